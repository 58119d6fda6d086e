"""Text generation from the command line."""
