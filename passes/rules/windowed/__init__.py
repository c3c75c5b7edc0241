"""Rules of ops that read windows: convolutions, pooling, resizing, padding."""
