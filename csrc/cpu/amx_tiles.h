// Matrix tiles: the registers of AMX, and the one product everything here is made of.
//
// All operands live in scratch as whole tiles of 1 KiB, each 16 lines of 64 bytes one after another, in three forms:
//   rows     16 rows of 32 bfloat16: the left operand
//   pairs    16 pairs of rows, 16 columns: line j, column c holds rows 2j and 2j + 1; the right operand
//   floats   16 rows of 16 float: sums
#pragma once
#include <cstdint>
#include <stdexcept>

#include "tile_permission.h"

namespace seq1f1b::cpu::amx {
namespace {

constexpr int64_t line_bytes = 64;  // of a line of a tile
constexpr int64_t tile_bytes = 1024;
constexpr int64_t tile_lines = 16;    // and columns of a tile of floats
constexpr int64_t tile_depth = 32;    // terms that one tile instruction sums
constexpr int64_t panel_length = 32;  // rows and columns that one product covers: two tiles each way

inline void request_tiles() {
  if (!tiles_are_granted()) throw std::runtime_error("the system does not grant this process the AMX tile registers");
}

// While one exists, the thread's tile registers are configured; afterwards they are released, since held tiles make
// every context switch and every system call dearer.
class TileSession {
 public:
  TileSession() {
    request_tiles();
    Configuration configuration{};
    configuration.palette = 1;
    for (int i = 0; i < 8; ++i) {
      configuration.bytes_of_line[i] = line_bytes;
      configuration.lines[i] = tile_lines;
    }
    asm volatile("ldtilecfg %0" : : "m"(configuration));
  }
  ~TileSession() { asm volatile("tilerelease" : : : "memory"); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;

 private:
  struct Configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_of_line[16];
    uint8_t lines[16];
  };
  static_assert(sizeof(Configuration) == 64, "the layout is the processor's");
};

// Written out rather than as intrinsics, whose definitions in some compilers do not say that they touch memory.
template <int Register>
inline void load_tile(const char* tile) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(tile), "r"(line_bytes), "i"(Register) : "memory");
}

template <int Register>
inline void store_tile(char* tile) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(tile), "r"(line_bytes), "i"(Register) : "memory");
}

template <int Register>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Register));
}

template <int Sum, int Left, int Right>
inline void add_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(Left), "i"(Right));
}

// A row of tiles along the summed dimension, and the row of tiles beside it.
struct Operand {
  const char* tiles;
  int64_t second;  // bytes to the other row of tiles
};

struct Sums {
  char* tiles;
  int64_t down, right;  // bytes to the tile below and to the one on the right
};

// 2 x 2 tiles of sums over `depth` tiles of the summed dimension; added to what is there, or written over it.
template <bool Accumulate>
inline void multiply(Operand left, Operand right, int64_t depth, Sums sums) {
  char* const below = sums.tiles + sums.down;
  if (Accumulate) {
    load_tile<0>(sums.tiles);
    load_tile<1>(sums.tiles + sums.right);
    load_tile<2>(below);
    load_tile<3>(below + sums.right);
  } else {
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
  }
  for (int64_t k = 0; k < depth; ++k) {
    load_tile<4>(left.tiles + k * tile_bytes);
    load_tile<6>(right.tiles + k * tile_bytes);
    add_product<0, 4, 6>();
    load_tile<7>(right.tiles + right.second + k * tile_bytes);
    add_product<1, 4, 7>();
    load_tile<5>(left.tiles + left.second + k * tile_bytes);
    add_product<2, 5, 6>();
    add_product<3, 5, 7>();
  }
  store_tile<0>(sums.tiles);
  store_tile<1>(sums.tiles + sums.right);
  store_tile<2>(below);
  store_tile<3>(below + sums.right);
}

}  // namespace
}  // namespace seq1f1b::cpu::amx
