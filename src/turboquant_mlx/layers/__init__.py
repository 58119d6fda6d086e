"""nn.Module twins of linear and expert layers that hold packed weights."""
