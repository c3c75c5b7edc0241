"""`autoshard plan` for models and configurations of other frameworks: what they run, and what would be faster."""
