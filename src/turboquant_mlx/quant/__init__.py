"""The mathematics of quantized weights: arrays in, arrays out, nothing about models."""
