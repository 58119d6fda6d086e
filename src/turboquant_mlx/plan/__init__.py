"""Will a model fit, and is it whole: answered from headers and small files alone."""
