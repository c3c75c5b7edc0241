"""From a user's call to the graph's flat tensors, and back."""
