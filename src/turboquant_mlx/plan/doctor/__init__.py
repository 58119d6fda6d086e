"""Is everything in order: a model's files, this installation, and do they suit each other."""
