"""Measuring a profile under torch.distributed. Needs torch, as nothing else in cost_model does."""
