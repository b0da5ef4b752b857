// The row kernel as C++: blocks and threads one after the other. Built by `rig.py`.
#define __device__
#define __global__
#define __launch_bounds__(threads)
#define __grid_constant__
struct uint4 { unsigned x, y, z, w; };
static struct { unsigned x; } blockIdx, threadIdx, blockDim, gridDim;
#include "rows.cu"

extern "C" void run(int word, unsigned blocks, unsigned threads, const Move* move) {
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
      switch (word) {
        case 16: rows16(*move); break;
        case 8: rows8(*move); break;
        case 4: rows4(*move); break;
        case 2: rows2(*move); break;
        case 1: rows1(*move); break;
      }
    }
  }
}
