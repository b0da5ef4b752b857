"""CUDA: streams and events of torch, a kernel compiled by NVRTC, and DMA in batches."""
