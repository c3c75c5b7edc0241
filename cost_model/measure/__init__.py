"""Measuring a profile under torch.distributed, with the collectives that plans run. Needs torch, as nothing else in
cost_model does."""
