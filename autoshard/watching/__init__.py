"""Every rank knows where the others are: what they do in turn, whether they live, and how to get out if not."""
