"""Checkpoints: pieces of the line in safetensors files, described by one manifest (see FORMAT.md).

The offline half (everything but `save` and `load`) needs the standard library and zlib-ng only, never torch.
"""
