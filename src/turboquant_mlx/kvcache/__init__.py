"""The key/value cache: what it costs, how it is packed, and how models come to use it."""
