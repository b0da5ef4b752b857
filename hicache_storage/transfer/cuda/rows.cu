// Pages of two memories, moved by their numbers. A page is `outer * inner` pieces of `width` words on
// either side. Compiled by NVRTC for the GPU that is there, and as C++ by the tests.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef IN_FLIGHT
#define IN_FLIGHT 8  // words that a thread reads before it writes: the bus has a long way
#endif

struct Side {
  const u64* parts;  // address of page 0 of each part
  const i64* pages;  // page numbers; null: 0, 1, 2, ...
  i64 page;          // bytes from one page, outer and inner piece to the next
  i64 outer;
  i64 inner;
};

struct Move {
  Side to;
  Side from;
  u32 parts;
  u32 pages;
  u32 outer;
  u32 inner;
  u32 width;  // in words
};

struct Place {
  u32 part, page, outer, inner, word;
};

template <typename Word>
__device__ inline Word* word_at(const Side& side, const Place& at) {
  const i64 page = side.pages ? side.pages[at.page] : at.page;
  const i64 bytes = page * side.page + at.outer * side.outer + at.inner * side.inner;
  return reinterpret_cast<Word*>(side.parts[at.part] + bytes) + at.word;
}

template <typename Word>
__device__ inline Word read_once(const Word* from) {
  return *from;
}

#ifdef __CUDA_ARCH__
// Host memory is read once, and what a model's kernels have in L1 stays there.
template <>
__device__ inline uint4 read_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
#endif

template <typename Word>
__device__ inline void move_rows(const Move& move) {
  // A part has fewer than 2^32 words: the engine refuses a longer one, and 32 bits divide faster.
  const u32 in_page = move.outer * move.inner * move.width;
  const u32 in_part = in_page * move.pages;
  const u64 words = static_cast<u64>(in_part) * move.parts;
  const u64 tile = static_cast<u64>(blockDim.x) * IN_FLIGHT;
  // Few blocks walk over all tiles, so that the other multiprocessors stay with the model.
  for (u64 start = blockIdx.x * tile; start < words; start += gridDim.x * tile) {
    Word value[IN_FLIGHT];
    Word* to[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) {
      const u64 word = start + static_cast<u64>(k) * blockDim.x + threadIdx.x;
      to[k] = nullptr;
      if (word < words) {
        Place at;
        at.part = static_cast<u32>(word / in_part);
        u32 rest = static_cast<u32>(word - static_cast<u64>(at.part) * in_part);
        at.page = rest / in_page;
        rest -= at.page * in_page;
        const u32 piece = rest / move.width;
        at.word = rest - piece * move.width;
        at.outer = piece / move.inner;
        at.inner = piece - at.outer * move.inner;
        value[k] = read_once(word_at<const Word>(move.from, at));
        to[k] = word_at<Word>(move.to, at);
      }
    }
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) {
      if (to[k]) *to[k] = value[k];
    }
  }
}

#define ROWS(bytes, Word) \
  extern "C" __global__ void __launch_bounds__(512) rows##bytes(const __grid_constant__ Move move) { \
    move_rows<Word>(move); \
  }
ROWS(16, uint4)
ROWS(8, u64)
ROWS(4, u32)
ROWS(2, unsigned short)
ROWS(1, unsigned char)
