"""Will a model fit, and is it whole: answered from headers and small files alone."""

DEFAULT_CONTEXT = 16384
"""Tokens that are planned for unless something else is asked."""
