"""How much text a quantized model loses: perplexity and divergence from the 16-bit model."""
