"""The checkpoint format: reading, writing, and letting stock libraries load it."""
