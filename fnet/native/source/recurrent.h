// LSTM and GRU over whole sequences, and their gradients. The products of the inputs with the kernel,
// and those with which the gradients of inputs and kernels end, are large products that the caller
// computes. What is left is the loop over time.
//
// A tile of the recurrent product holds all gates of WIDTH units for some rows of the batch, so that the
// gates are computed from registers. The rows of a batch are independent: threads divide the batch, and
// none ever waits for another one.
#pragma once

#include <array>

#include "functions.h"
#include "parallel.h"

namespace fnet {
namespace recurrent {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif

// All arrays over time are [time, batch, ...].
struct Sequence {
  int64_t time, batch, units;
  bool reverse;
  bool rounded;          // whether the hidden state is rounded to bfloat16 for the recurrent product
  const uint8_t* valid;  // [time, batch]: where it is 0, the carry stays and the output is 0; or null
};

template <class Cell, class Output>
struct Forward : Sequence {
  const float* inputs;          // [time, batch, gates * units]
  const float* kernel;          // [units, gates * units]
  const float* bias;            // [gates * units], or null
  const float* recurrent_bias;  // [units], added to the last gate's recurrent product, or null
  std::array<const float*, Cell::STATES> start;  // [batch, units]
  Output* output;                                // [time, batch, units]
  std::array<float*, Cell::STATES> after;        // [batch, units]
  std::array<float*, Cell::STATES> before;       // [time, batch, units], the carry before a step, or null
  std::array<float*, 4> kept;                    // [time, batch, units], what the gradient needs, or null
};

template <class Cell, class Output>
struct Gradient : Sequence {
  const float* kernel;                            // [units, gates * units]
  std::array<const float*, Cell::STATES> before;  // as in Forward
  std::array<const float*, 4> kept;
  const Output* output;                           // the cotangent of the output, or null
  std::array<const float*, Cell::STATES> after;   // the cotangents of the last carry, or null
  float* projected;       // [time, batch, gates * units], the cotangents of the products of the inputs
  float* recurrent;       // those of the recurrent products; may be the same array
  std::array<float*, Cell::STATES> start;  // [batch, units]
  float* bias;            // [gates * units], the sum of `projected`, or null
  float* recurrent_bias;  // [units], the sum of the last gate of `recurrent`, or null
};

// The formulas. `forward` returns the new carry, and `kept` what `gradient` needs: the gates. In
// `gradient`, `carry` is the cotangent of the new carry at the beginning. At the end, it is that of the
// old carry without the part that goes through the recurrent products.

struct Lstm {
  static constexpr int GATES = 4, STATES = 2;
  typedef std::array<Floats, STATES> Carry;

  // The sums of both products are the same array: only their sum matters.
  static constexpr bool SHARED = true;

  static FNET_INLINE Carry forward(const Floats* sums, Floats, const Carry& old, Floats* kept) {
    const Floats i = sigmoid(sums[0]), f = sigmoid(sums[1]), g = tanh(sums[2]), o = sigmoid(sums[3]);
    const Floats cell = f * old[1] + i * g;
    kept[0] = i, kept[1] = f, kept[2] = g, kept[3] = o;
    return {o * tanh(cell), cell};
  }

  static FNET_INLINE void gradient(const Carry& old, const Floats* kept, Carry& carry, Floats* projected, Floats*) {
    const Floats i = kept[0], f = kept[1], g = kept[2], o = kept[3];
    const Floats squashed = tanh(f * old[1] + i * g);
    const Floats cell = carry[1] + carry[0] * o * (1.0f - squashed * squashed);
    projected[0] = cell * g * (i * (1.0f - i));
    projected[1] = cell * old[1] * (f * (1.0f - f));
    projected[2] = cell * i * (1.0f - g * g);
    projected[3] = carry[0] * squashed * (o * (1.0f - o));
    carry = {Floats{}, cell * f};
  }
};

struct Gru {
  static constexpr int GATES = 3, STATES = 1;
  typedef std::array<Floats, STATES> Carry;
  static constexpr bool SHARED = false;  // the last gate's products are not added, but gated

  static FNET_INLINE Carry forward(const Floats* sums, Floats projected, const Carry& old, Floats* kept) {
    const Floats r = sigmoid(sums[0]), z = sigmoid(sums[1]), n = tanh(projected + r * sums[2]);
    kept[0] = r, kept[1] = z, kept[2] = n, kept[3] = sums[2];
    return {(1.0f - z) * n + z * old[0]};
  }

  static FNET_INLINE void gradient(const Carry& old, const Floats* kept, Carry& carry, Floats* projected,
                                   Floats* recurrent) {
    const Floats r = kept[0], z = kept[1], n = kept[2], product = kept[3];
    const Floats of_n = carry[0] * (1.0f - z) * (1.0f - n * n);
    projected[0] = recurrent[0] = of_n * product * (r * (1.0f - r));
    projected[1] = recurrent[1] = carry[0] * (old[0] - n) * (z * (1.0f - z));
    projected[2] = of_n;
    recurrent[2] = of_n * r;
    carry = {carry[0] * z};
  }
};

namespace internal {

FNET_INLINE int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Splits the rows of a batch into tasks, each with whole tiles where possible, and calls
// task(index, first row, last row + 1).
template <class Task>
void over_rows(Pool& pool, int64_t batch, int64_t tasks, Task&& task) {
  parallel(pool, tasks, [&](int64_t index) { task(index, batch * index / tasks, batch * (index + 1) / tasks); });
}

// Calls tile(row, rows) for the rows from `first` to `last`, as evenly as tiles of at most MOST rows allow.
template <int MOST, class Tile>
FNET_INLINE void over_tiles(int64_t first, int64_t last, Tile&& tile) {
  const int64_t tiles = blocks_of(last - first, MOST);
  for (int64_t i = 0; i < tiles; i++) {
    const int64_t row = first + (last - first) * i / tiles;
    tile(row, first + (last - first) * (i + 1) / tiles - row);
  }
}

// sums[m][n] += sum over k of rows[m][k] packed[k][n], for M rows of `stride` elements. With few rows,
// alternate sums keep the multipliers busy.
template <int M, int N>
FNET_INLINE void multiply(const float* rows, int64_t stride, int64_t depth, const float* packed,
                          Floats (&sums)[M][N]) {
  constexpr int PARTS = M * N >= 8 ? 1 : M * N >= 4 ? 2 : 4;
  Floats parts[PARTS][M][N] = {};
  FNET_UNROLL for (int m = 0; m < M; m++) FNET_UNROLL for (int n = 0; n < N; n++) parts[0][m][n] = sums[m][n];
  int64_t k = 0;
  for (; k + PARTS <= depth; k += PARTS) {
    FNET_UNROLL for (int part = 0; part < PARTS; part++) {
      Floats columns[N];
      FNET_UNROLL for (int n = 0; n < N; n++) columns[n] = load(packed + ((k + part) * N + n) * WIDTH);
      FNET_UNROLL for (int m = 0; m < M; m++) {
        const float factor = rows[m * stride + k + part];
        FNET_UNROLL for (int n = 0; n < N; n++) parts[part][m][n] += columns[n] * factor;
      }
    }
  }
  for (; k < depth; k++) {
    FNET_UNROLL for (int m = 0; m < M; m++) FNET_UNROLL for (int n = 0; n < N; n++) {
      parts[0][m][n] += load(packed + (k * N + n) * WIDTH) * rows[m * stride + k];
    }
  }
  FNET_UNROLL for (int m = 0; m < M; m++) FNET_UNROLL for (int n = 0; n < N; n++) {
    Floats sum = parts[0][m][n];
    FNET_UNROLL for (int part = 1; part < PARTS; part++) sum += parts[part][m][n];
    sums[m][n] = sum;
  }
}

FNET_INLINE Floats get(const float* from, int64_t count) { return count == WIDTH ? load(from) : load(from, count); }
FNET_INLINE Floats get(const bfloat16* from, int64_t count) { return count == WIDTH ? load(from) : load(from, count); }

template <class T>
FNET_INLINE void put(T* to, Floats vector, int64_t count) {
  if (count == WIDTH) {
    store(to, vector);
  } else {
    store(to, vector, count);
  }
}

FNET_INLINE Floats through_bfloat16(Floats vector) {
  return bits_of<Floats>(__builtin_convertvector(rounded(vector), Words) << 16);
}

template <class Cell, class Output>
class ForwardPass {
 public:
  static constexpr int GATES = Cell::GATES, STATES = Cell::STATES;
  static constexpr int ROWS = std::min(8, (REGISTERS - 1 - GATES) / GATES);

  explicit ForwardPass(const Forward<Cell, Output>& given) : given_(given) {}

  void run(Pool& pool) {
    const int64_t blocks = blocks_of(given_.units, WIDTH);
    packed_.grow(blocks * given_.units * GATES * WIDTH);
    parallel(pool, blocks, [&](int64_t block) { pack(block); });
    over_rows(pool, given_.batch, std::min(pool.threads(), given_.batch),
              [&](int64_t, int64_t first, int64_t last) { sequence(first, last); });
  }

 private:
  typedef typename Cell::Carry Carry;
  typedef void (ForwardPass::*Tile)(int64_t, int64_t, int64_t, const float*, float*) const;

  // [block of units][unit of the hidden state][gate][WIDTH]
  void pack(int64_t block) {
    const int64_t units = given_.units, first = block * WIDTH, count = std::min<int64_t>(WIDTH, units - first);
    float* to = packed_.data() + block * units * GATES * WIDTH;
    for (int64_t k = 0; k < units; k++) {
      for (int gate = 0; gate < GATES; gate++, to += WIDTH) {
        store(to, get(given_.kernel + (k * GATES + gate) * units + first, count));
      }
    }
  }

  void sequence(int64_t first, int64_t last) const {
    const int64_t units = given_.units, size = (last - first) * units;
    for (int i = 0; i < STATES; i++) {
      std::memcpy(given_.after[i] + first * units, given_.start[i] + first * units, sizeof(float) * size);
    }
    Memory<float> memory(2 * size);
    float *hidden = memory.data(), *next = hidden + size;  // as the product reads them
    for (int64_t i = 0; i < size; i++) {
      const float state = given_.start[0][first * units + i];
      hidden[i] = given_.rounded ? widen(narrow<bfloat16>(state)) : state;
    }
    for (int64_t step = 0; step < given_.time; step++) {
      const int64_t time = given_.reverse ? given_.time - 1 - step : step;
      for (int64_t block = 0; block < blocks_of(units, WIDTH); block++) {
        over_tiles<ROWS>(first, last, [&](int64_t row, int64_t rows) {
          const int64_t offset = (row - first) * units;
          (this->*TILES[rows - 1])(time, row, block, hidden + offset, next + offset);
        });
      }
      std::swap(hidden, next);
    }
  }

  template <int M>
  void tile(int64_t time, int64_t row, int64_t block, const float* hidden, float* next) const {
    const int64_t units = given_.units, unit = block * WIDTH, count = std::min<int64_t>(WIDTH, units - unit);
    const float* inputs = given_.inputs + (time * given_.batch + row) * GATES * units + unit;
    Floats sums[M][GATES];
    FNET_UNROLL for (int gate = 0; gate < GATES; gate++) {
      const bool apart = !Cell::SHARED && gate == GATES - 1;
      const float* bias = apart ? given_.recurrent_bias : given_.bias ? given_.bias + gate * units : nullptr;
      const Floats start = bias ? get(bias + unit, count) : Floats{};
      FNET_UNROLL for (int m = 0; m < M; m++) {
        sums[m][gate] = apart ? start : start + get(inputs + (m * GATES + gate) * units, count);
      }
    }
    multiply<M, GATES>(hidden, units, units, packed_.data() + block * units * GATES * WIDTH, sums);
    const Floats bias = !Cell::SHARED && given_.bias ? get(given_.bias + (GATES - 1) * units + unit, count) : Floats{};
    for (int m = 0; m < M; m++) {
      Floats projected = {};
      if (!Cell::SHARED) projected = bias + get(inputs + (m * GATES + GATES - 1) * units, count);
      finish(time, row + m, unit, count, sums[m], projected, next + m * units);
    }
  }

  FNET_INLINE void finish(int64_t time, int64_t row, int64_t unit, int64_t count, const Floats* sums,
                          Floats projected, float* next) const {
    const int64_t place = row * given_.units + unit;
    const int64_t at = time * given_.batch * given_.units + place;
    Carry old;
    FNET_UNROLL for (int i = 0; i < STATES; i++) old[i] = get(given_.after[i] + place, count);
    Floats kept[4];
    Carry carry = Cell::forward(sums, projected, old, kept);
    if (given_.kept[0]) {
      FNET_UNROLL for (int i = 0; i < STATES; i++) put(given_.before[i] + at, old[i], count);
      FNET_UNROLL for (int i = 0; i < 4; i++) put(given_.kept[i] + at, kept[i], count);
    }
    Floats output = carry[0];
    if (given_.valid && !given_.valid[time * given_.batch + row]) carry = old, output = Floats{};
    FNET_UNROLL for (int i = 0; i < STATES; i++) put(given_.after[i] + place, carry[i], count);
    put(given_.output + at, output, count);
    put(next + unit, given_.rounded ? through_bfloat16(carry[0]) : carry[0], count);
  }

  template <int... M>
  static constexpr std::array<Tile, sizeof...(M)> tiles(std::integer_sequence<int, M...>) {
    return {{&ForwardPass::template tile<M + 1>...}};
  }
  static constexpr std::array<Tile, ROWS> TILES = tiles(std::make_integer_sequence<int, ROWS>());

  const Forward<Cell, Output>& given_;
  Memory<float> packed_;
};

template <class Cell, class Output>
class GradientPass {
 public:
  static constexpr int GATES = Cell::GATES, STATES = Cell::STATES;

  explicit GradientPass(const Gradient<Cell, Output>& given) : given_(given) {}

  void run(Pool& pool) {
    const int64_t units = given_.units, depth = GATES * units, blocks = blocks_of(units, BLOCK);
    packed_.grow(blocks * depth * BLOCK);
    parallel(pool, blocks, [&](int64_t block) { pack(block); });
    const int64_t tasks = std::min(pool.threads(), given_.batch), biases = depth + units;
    Memory<float> sums(tasks * biases);
    std::fill_n(sums.data(), tasks * biases, 0.0f);
    over_rows(pool, given_.batch, tasks, [&](int64_t index, int64_t first, int64_t last) {
      sequence(first, last, sums.data() + index * biases);
    });
    add(given_.bias, depth, sums.data(), tasks, biases);
    add(given_.recurrent_bias, units, sums.data() + depth, tasks, biases);
  }

 private:
  static constexpr int BLOCK = COLUMNS * WIDTH;
  typedef void (GradientPass::*Tile)(const float*, int64_t, int64_t) const;

  static void add(float* total, int64_t size, const float* sums, int64_t tasks, int64_t stride) {
    if (total == nullptr) return;
    std::fill_n(total, size, 0.0f);
    for (int64_t task = 0; task < tasks; task++) {
      for (int64_t i = 0; i < size; i++) total[i] += sums[task * stride + i];
    }
  }

  // The transposed kernel: [block of units][gate and unit][BLOCK]
  void pack(int64_t block) {
    const int64_t units = given_.units, depth = GATES * units, first = block * BLOCK;
    float* to = packed_.data() + block * depth * BLOCK;
    std::fill_n(to, depth * BLOCK, 0.0f);
    for (int64_t start = 0; start < depth; start += 16) {  // so that 16 lines are written in turn
      const int64_t end = std::min(start + 16, depth);
      for (int64_t unit = first; unit < std::min(first + BLOCK, units); unit++) {
        for (int64_t k = start; k < end; k++) to[k * BLOCK + unit - first] = given_.kernel[unit * depth + k];
      }
    }
  }

  void sequence(int64_t first, int64_t last, float* biases) const {
    const int64_t units = given_.units, size = (last - first) * units;
    for (int i = 0; i < STATES; i++) {
      float* start = given_.start[i] + first * units;
      if (given_.after[i]) {
        std::memcpy(start, given_.after[i] + first * units, sizeof(float) * size);
      } else {
        std::fill_n(start, size, 0.0f);
      }
    }
    for (int64_t step = 0; step < given_.time; step++) {
      const int64_t time = given_.reverse ? step : given_.time - 1 - step;
      for (int64_t row = first; row < last; row++) gates(time, row, biases);
      const float* recurrent = given_.recurrent + time * given_.batch * GATES * units;
      for (int64_t block = 0; block < blocks_of(units, BLOCK); block++) {
        over_tiles<ROWS>(first, last, [&](int64_t row, int64_t rows) {
          (this->*TILES[rows - 1])(recurrent + row * GATES * units, row, block);
        });
      }
    }
  }

  void gates(int64_t time, int64_t row, float* biases) const {
    const int64_t units = given_.units, place = time * given_.batch + row;
    float *projected = given_.projected + place * GATES * units, *recurrent = given_.recurrent + place * GATES * units;
    const bool stays = given_.valid && !given_.valid[place];
    for (int64_t unit = 0; unit < units; unit += WIDTH) {
      const int64_t count = std::min<int64_t>(WIDTH, units - unit), at = place * units + unit;
      typename Cell::Carry old, carry, passed = {};
      FNET_UNROLL for (int i = 0; i < STATES; i++) {
        old[i] = get(given_.before[i] + at, count);
        carry[i] = get(given_.start[i] + row * units + unit, count);
      }
      if (stays) {  // zeros go on, which become NaN where the formula is not finite, as in a `where` of JAX
        std::swap(carry, passed);
      } else if (given_.output) {
        carry[0] += get(given_.output + at, count);
      }
      Floats kept[4], of_projected[GATES], of_recurrent[GATES];
      FNET_UNROLL for (int i = 0; i < 4; i++) kept[i] = get(given_.kept[i] + at, count);
      Cell::gradient(old, kept, carry, of_projected, of_recurrent);
      FNET_UNROLL for (int gate = 0; gate < GATES; gate++) {
        put(projected + gate * units + unit, of_projected[gate], count);
        if (!Cell::SHARED) put(recurrent + gate * units + unit, of_recurrent[gate], count);
        if (given_.bias) sum(biases + gate * units + unit, of_projected[gate], count);
      }
      if (given_.recurrent_bias) sum(biases + GATES * units + unit, of_recurrent[GATES - 1], count);
      FNET_UNROLL for (int i = 0; i < STATES; i++) {
        put(given_.start[i] + row * units + unit, carry[i] + passed[i], count);
      }
    }
  }

  static FNET_INLINE void sum(float* total, Floats term, int64_t count) { put(total, get(total, count) + term, count); }

  // Adds the product of M rows of cotangents with the transposed kernel to the cotangent of the hidden state.
  template <int M>
  void tile(const float* recurrent, int64_t row, int64_t block) const {
    const int64_t units = given_.units, depth = GATES * units, unit = block * BLOCK;
    float* hidden = given_.start[0] + row * units + unit;
    Floats sums[M][COLUMNS];
    int64_t counts[COLUMNS];
    FNET_UNROLL for (int n = 0; n < COLUMNS; n++) {
      counts[n] = std::max<int64_t>(0, std::min<int64_t>(WIDTH, units - unit - n * WIDTH));
    }
    FNET_UNROLL for (int m = 0; m < M; m++) FNET_UNROLL for (int n = 0; n < COLUMNS; n++) {
      sums[m][n] = counts[n] ? get(hidden + m * units + n * WIDTH, counts[n]) : Floats{};
    }
    multiply<M, COLUMNS>(recurrent, depth, depth, packed_.data() + block * depth * BLOCK, sums);
    FNET_UNROLL for (int m = 0; m < M; m++) FNET_UNROLL for (int n = 0; n < COLUMNS; n++) {
      if (counts[n]) put(hidden + m * units + n * WIDTH, sums[m][n], counts[n]);
    }
  }

  template <int... M>
  static constexpr std::array<Tile, sizeof...(M)> tiles(std::integer_sequence<int, M...>) {
    return {{&GradientPass::template tile<M + 1>...}};
  }
  static constexpr std::array<Tile, ROWS> TILES = tiles(std::make_integer_sequence<int, ROWS>());

  const Gradient<Cell, Output>& given_;
  Memory<float> packed_;
};

}  // namespace internal

template <class Cell, class Output>
void forward(Pool& pool, const Forward<Cell, Output>& given) {
  if (given.batch > 0 && given.units > 0) internal::ForwardPass<Cell, Output>(given).run(pool);
}

template <class Cell, class Output>
void gradient(Pool& pool, const Gradient<Cell, Output>& given) {
  if (given.units > 0) internal::GradientPass<Cell, Output>(given).run(pool);
}

}  // namespace recurrent
}  // namespace fnet
