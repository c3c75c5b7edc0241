"""Every rank knows where the others are: what they do, whether they live, and how to get out when they do not."""
