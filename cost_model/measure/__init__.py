"""Measuring a profile under torch.distributed, with the collectives that plans run. Nothing else in
cost_model needs torch."""
