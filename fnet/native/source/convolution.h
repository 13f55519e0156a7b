// Convolutions of dense arrays with channels last, as sums of small matrix products over the positions of
// the window. Nothing is transposed or padded in memory: the kernel is packed in blocks that stay in the
// cache, and what lies outside the input is left out.
//
//   product:          y[n, o, f] = sum over k, c of x[n, o stride + k w_dilation - low, c] w[k, c, f]
//   kernel gradient:  dw[k, c, f] = sum over n, o of x[n, o stride + k w_dilation - low, c] dy[n, o, f]
//
// A tap is a position of the window, a pixel a position of the output. A unit is what the register tile
// multiplies: one float32 value, or a pair of bfloat16 values along the contraction.
#pragma once

#include <array>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace fnet {
namespace convolution {

constexpr int64_t BLOCK = COLUMNS * WIDTH;  // features of a task
constexpr int64_t PANEL = 1200;             // units of a packed block: 300 kB with AVX-512
constexpr int64_t PIXELS = 480;             // pixels of a task
constexpr int64_t LIMIT = int64_t{1} << 31;  // of attributes, so that products fit into 64 bits

struct Geometry {
  int64_t batch, channels, features, groups;
  int64_t in[3], out[3], window[3];
  int64_t strides[3], low[3], x_dilation[3], w_dilation[3];
  bool flipped, transposed;

  int64_t taps() const { return window[0] * window[1] * window[2]; }
  int64_t pixels() const { return batch * out[0] * out[1] * out[2]; }
  int64_t in_pixels() const { return batch * in[0] * in[1] * in[2]; }
  int64_t group_channels() const { return channels / groups; }
  int64_t group_features() const { return features / groups; }

  // XLA multiplies the zeros of padding, and those of a dilated input, with the other operand, so that one
  // which is not finite makes the result NaN there. These forms leave them out, in JAX 0.10 and 0.12: those
  // for which Eigen has no kernel, and its input gradients in one and two dimensions.
  bool multiplies_padding(bool gradient) const {
    const auto size = [](const int64_t(&values)[3]) { return values[0] * values[1] * values[2]; };
    const bool plane = in[0] == 1 && out[0] == 1 && window[0] == 1;
    const bool larger = size(gradient ? out : window) > size(in);  // XLA's window than its input
    if (gradient) return !larger;
    if (groups > 1) return true;
    return !larger && !(plane && size(x_dilation) > 1 && size(w_dilation) == 1 && size(strides) == 1);
  }
};

inline int64_t ceil_divide(int64_t a, int64_t b) { return a / b + (a % b > 0); }

// ---- one axis: which output positions have the same taps inside the input

struct Tap {
  int64_t index;  // in the window
  int64_t input;  // the position that it reads for the first output of its run's phase
};

// Outputs `first + step j` for j < count. Their taps read `tap.input + moved + stride j`.
struct Run {
  int64_t first, step, count;
  int64_t moved, stride;
  int64_t begin, end;  // in Axis::taps
};

struct Axis {
  std::vector<Tap> taps;
  std::vector<Run> runs;
  std::vector<int32_t> run;  // of each output

  // With a dilated input, outputs with the same remainder by the dilation (a phase) have the same taps, and
  // their inputs are neighbors. Without, all outputs are one phase. Borders cut a phase into runs.
  Axis(const Geometry& g, int axis) : run(g.out[axis]) {
    for (int64_t phase = 0; phase < std::min(g.x_dilation[axis], g.out[axis]); phase++) add_phase(g, axis, phase);
    for (size_t i = 0; i < runs.size(); i++)
      for (int64_t j = 0; j < runs[i].count; j++) run[runs[i].first + runs[i].step * j] = static_cast<int32_t>(i);
  }

 private:
  void add_phase(const Geometry& g, int axis, int64_t phase) {
    const int64_t dilation = g.x_dilation[axis], stride = g.strides[axis], in = g.in[axis];
    const int64_t count = ceil_divide(g.out[axis] - phase, dilation);
    const int64_t begin = static_cast<int64_t>(taps.size());
    std::vector<int64_t> borders = {0, count};
    auto starts = [&](const Tap& tap) { return std::clamp<int64_t>(ceil_divide(-tap.input, stride), 0, count); };
    auto ends = [&](const Tap& tap) { return std::clamp<int64_t>(ceil_divide(in - tap.input, stride), 0, count); };
    for (int64_t k = 0; k < g.window[axis]; k++) {
      const int64_t position = phase + k * g.w_dilation[axis] - g.low[axis];
      if (position % dilation != 0) continue;
      taps.push_back({k, position / dilation});
      borders.push_back(starts(taps.back()));
      borders.push_back(ends(taps.back()));
    }
    std::sort(borders.begin(), borders.end());
    borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
    int64_t low = static_cast<int64_t>(taps.size()), high = low;  // taps low to high are inside, later ones beyond
    for (size_t i = 0; i + 1 < borders.size(); i++) {
      const int64_t j = borders[i];
      while (low > begin && starts(taps[low - 1]) <= j) low--;
      while (high > begin && ends(taps[high - 1]) <= j) high--;
      const int64_t first = phase + dilation * j;
      runs.push_back({first, dilation, borders[i + 1] - j, stride * j, stride, std::min(low, high), high});
    }
  }
};

// ---- memory of a thread that is kept between tasks and calls

// A stretch of the contraction: x at `offset` from a pixel's first tap, and the packed kernel from `row`.
struct Stretch {
  int64_t offset, row, length;
};

template <class Unit, class Out>
struct Pixel {
  const Unit* x;
  Out* y;
};

// Pixels with the same taps.
template <class Unit, class Out>
struct Alike {
  int64_t runs[3];
  std::vector<Pixel<Unit, Out>> pixels;
  std::vector<Stretch> stretches;
};

template <class Unit, class Out>
struct Workspace {
  Memory<Unit> panel;
  Memory<float> sums;
  std::vector<Alike<Unit, Out>> alike;
  size_t used = 0;  // of `alike`
  std::vector<Stretch> clipped;

  static Workspace& of_thread() {
    static thread_local Workspace workspace;
    return workspace;
  }

  Alike<Unit, Out>& find(int64_t z, int64_t y, int64_t x) {
    for (size_t i = used; i-- > 0;) {
      const int64_t(&runs)[3] = alike[i].runs;
      if (runs[2] == x && runs[1] == y && runs[0] == z) return alike[i];
    }
    if (used == alike.size()) alike.emplace_back();
    Alike<Unit, Out>& fresh = alike[used++];
    fresh.runs[0] = z, fresh.runs[1] = y, fresh.runs[2] = x;
    fresh.pixels.clear();
    return fresh;
  }
};

// ---- the register tiles

// y[m, :] = (or += ) sum over stretches of x[m, offset + i] * packed[row + i, :], for M pixels and N vectors
// of features, of which the last has `lanes` elements.
template <class Unit, class Out, int M, int N>
void multiply(const Pixel<Unit, Out>* pixels, int64_t feature, const Stretch* stretches, int64_t count,
              const Unit* packed, int64_t lanes, bool accumulate) {
  Floats sums[M][N];
  const Unit* x[M];
  FNET_UNROLL
  for (int m = 0; m < M; m++) {
    x[m] = pixels[m].x;
    const Out* y = pixels[m].y + feature;
    FNET_UNROLL
    for (int n = 0; n < N; n++) {
      if (!accumulate) sums[m][n] = Floats{};
      else sums[m][n] = n == N - 1 ? load(y + n * WIDTH, lanes) : load(y + n * WIDTH);
    }
  }
  for (int64_t s = 0; s < count; s++) {
    const Unit* row = packed + stretches[s].row * N * WIDTH;
    const int64_t end = stretches[s].offset + stretches[s].length;
    for (int64_t i = stretches[s].offset; i < end; i++, row += N * WIDTH) {
      decltype(load(row)) w[N];
      FNET_UNROLL
      for (int n = 0; n < N; n++) w[n] = load(row + n * WIDTH);
      FNET_UNROLL
      for (int m = 0; m < M; m++) {
        const auto value = broadcast(x[m] + i);
        FNET_UNROLL
        for (int n = 0; n < N; n++) sums[m][n] = multiplied(sums[m][n], value, w[n]);
      }
    }
  }
  FNET_UNROLL
  for (int m = 0; m < M; m++) {
    Out* y = pixels[m].y + feature;
    FNET_UNROLL
    for (int n = 0; n < N; n++) {
      if (n == N - 1) store(y + n * WIDTH, sums[m][n], lanes);
      else store(y + n * WIDTH, sums[m][n]);
    }
  }
}

template <class Unit, class Out>
using Multiply = void (*)(const Pixel<Unit, Out>*, int64_t, const Stretch*, int64_t, const Unit*, int64_t, bool);

template <class Unit, class Out, size_t... I>
constexpr std::array<Multiply<Unit, Out>, ROWS * COLUMNS> multiplies(std::index_sequence<I...>) {
  return {multiply<Unit, Out, I / COLUMNS + 1, I % COLUMNS + 1>...};
}

template <class Unit, class Out>
constexpr auto MULTIPLY = multiplies<Unit, Out>(std::make_index_sequence<ROWS * COLUMNS>());

// One pixel's contribution to the kernel's gradient at a tap.
template <class Unit>
struct Contribution {
  const Unit* x;
  const Unit* dy;
};

// dw[m, :] = (or +=) sum over contributions of x[channel + m] * dy[:], for M channels and N vectors of features.
template <class Unit, int M, int N>
void contribute(const Contribution<Unit>* contributions, int64_t count, int64_t channel, float* dw, int64_t stride,
                int64_t lanes, bool accumulate) {
  Floats sums[M][N];
  FNET_UNROLL
  for (int m = 0; m < M; m++) {
    FNET_UNROLL
    for (int n = 0; n < N; n++) {
      const float* from = dw + m * stride + n * WIDTH;
      if (!accumulate) sums[m][n] = Floats{};
      else sums[m][n] = n == N - 1 ? load(from, lanes) : load(from);
    }
  }
  for (int64_t i = 0; i < count; i++) {
    const Unit* x = contributions[i].x + channel;
    const Unit* dy = contributions[i].dy;
    decltype(load(dy)) row[N];
    FNET_UNROLL
    for (int n = 0; n < N; n++) row[n] = load(dy + n * WIDTH);
    FNET_UNROLL
    for (int m = 0; m < M; m++) {
      const auto value = broadcast(x + m);
      FNET_UNROLL
      for (int n = 0; n < N; n++) sums[m][n] = multiplied(sums[m][n], value, row[n]);
    }
  }
  FNET_UNROLL
  for (int m = 0; m < M; m++) {
    FNET_UNROLL
    for (int n = 0; n < N; n++) {
      float* to = dw + m * stride + n * WIDTH;
      if (n == N - 1) store(to, sums[m][n], lanes);
      else store(to, sums[m][n]);
    }
  }
}

template <class Unit>
using Contribute = void (*)(const Contribution<Unit>*, int64_t, int64_t, float*, int64_t, int64_t, bool);

template <class Unit, size_t... I>
constexpr std::array<Contribute<Unit>, ROWS * COLUMNS> contributes(std::index_sequence<I...>) {
  return {contribute<Unit, I / COLUMNS + 1, I % COLUMNS + 1>...};
}

template <class Unit>
constexpr auto CONTRIBUTE = contributes<Unit>(std::make_index_sequence<ROWS * COLUMNS>());

inline size_t tile(int64_t rows, int64_t columns) { return static_cast<size_t>((rows - 1) * COLUMNS + columns - 1); }

// Calls body(begin, size) for nearly equal parts of `count` rows that fit into a tile.
template <class Body>
void split(int64_t count, Body&& body) {
  const int64_t parts = ceil_divide(count, ROWS);
  for (int64_t part = 0; part < parts; part++) {
    const int64_t begin = count * part / parts, end = count * (part + 1) / parts;
    body(begin, end - begin);
  }
}

// The features of a group in blocks of nearly equal numbers of vectors.
struct Blocks {
  int64_t features, vectors, count;

  explicit Blocks(int64_t features_)
      : features(features_), vectors(ceil_divide(features_, WIDTH)), count(ceil_divide(vectors, COLUMNS)) {}

  struct Block {
    int64_t begin, size, vectors, lanes;
  };
  Block operator[](int64_t i) const {
    const int64_t begin = vectors * i / count, end = vectors * (i + 1) / count;
    const int64_t size = std::min(end * WIDTH, features) - begin * WIDTH;
    return {begin * WIDTH, size, end - begin, size - (end - begin - 1) * WIDTH};
  }
};

// ---- packing of a kernel

// Whether all values that were checked are finite: 0 times the others is NaN.
class Finite {
 public:
  FNET_INLINE void check(float, Words values) { zeros_ += bits_of<Floats>(values) * 0.0f; }
#if defined(FNET_PAIRS)
  FNET_INLINE void check(Pair, Words pairs) {
    zeros_ += bits_of<Floats>(pairs << 16) * 0.0f;
    zeros_ += bits_of<Floats>(pairs & 0xffff0000u) * 0.0f;
  }
#endif
  bool all() const {
    float sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += zeros_[i];
    return sum == 0;
  }

 private:
  Floats zeros_ = {};
};

// Reads units from a kernel: `across` features from the rows of a unit's channels, which are `stride` apart,
// and `along` the channels of one feature. Elements from `count` on are zero.
template <class Unit, class Weight>
struct Reader {  // float32 units
  static constexpr int64_t CHANNELS = 1;
  static FNET_INLINE Words across(const Weight* from, int64_t, int64_t, int64_t count) {
    return bits_of<Words>(count == WIDTH ? load(from) : load(from, count));
  }
  static FNET_INLINE Words along(const Weight* from, int64_t channels) {
    return bits_of<Words>(channels >= WIDTH ? load(from) : load(from, channels));
  }
};

#if defined(FNET_PAIRS)
template <>
struct Reader<Pair, bfloat16> {
  static constexpr int64_t CHANNELS = 2;
  static FNET_INLINE Words across(const bfloat16* from, int64_t stride, int64_t channels, int64_t count) {
    const Words low = bits_of<Words>(count == WIDTH ? load(from) : load(from, count)) >> 16;
    if (channels < 2) return low;
    return low | bits_of<Words>(count == WIDTH ? load(from + stride) : load(from + stride, count));
  }
  static FNET_INLINE Words along(const bfloat16* from, int64_t channels) {
    Words pairs = {};
    std::memcpy(&pairs, from, channels >= 2 * WIDTH ? sizeof(pairs) : 2 * static_cast<size_t>(channels));
    return pairs;
  }
};
#endif

// ---- the product

template <class Unit, class Weight, class Out>
class Product {
 public:
  // x holds `units` units for each pixel and group.
  Product(Pool& pool, const Geometry& geometry, const Unit* x, int64_t units, const Weight* w, Out* y)
      : pool_(pool),
        g_(geometry),
        x_(x),
        w_(w),
        y_(y),
        units_(units),
        axes_{Axis(geometry, 0), Axis(geometry, 1), Axis(geometry, 2)},
        blocks_(geometry.group_features()),
        contraction_(geometry.taps() * units),
        chunks_(std::max<int64_t>(1, ceil_divide(contraction_, PANEL))) {}

  void run() {
    const int64_t pixels = g_.pixels(), columns = g_.groups * blocks_.count, threads = pool_.threads();
    // Enough tasks that no thread waits long for the last one, of enough pixels to pay for packing.
    const int64_t balanced = threads == 1 ? PIXELS : pixels * columns / (4 * threads);
    const int64_t size = std::clamp<int64_t>(balanced, PIXELS / 10, PIXELS);
    const int64_t ranges = ceil_divide(pixels, size);
    parallel(pool_, ranges * columns, [&](int64_t task) {
      const int64_t range = task / columns, column = task % columns;
      compute(pixels * range / ranges, pixels * (range + 1) / ranges, column / blocks_.count,
              blocks_[column % blocks_.count]);
    });
  }

 private:
  using Space = Workspace<Unit, Out>;

  void compute(int64_t begin, int64_t end, int64_t group, const Blocks::Block& block) {
    Space& space = Space::of_thread();
    find_pixels(space, begin, end, group);
    const int64_t columns = block.vectors * WIDTH, feature = group * g_.group_features() + block.begin;
    const int64_t chunk_size = ceil_divide(contraction_, chunks_);
    space.panel.grow(std::max<int64_t>(1, chunk_size * columns));
    bool in_place = std::is_same<Out, float>::value;
    for (int64_t chunk = 0; chunk < chunks_; chunk++) {
      const int64_t first = std::min(contraction_, chunk * chunk_size);
      const int64_t last = std::min(contraction_, first + chunk_size);
      const bool finite = pack(space.panel.data(), first, last, group, block);
      const bool pad = !finite && g_.multiplies_padding(false);
      if (!std::is_same<Out, float>::value && chunk == 0) {
        in_place = chunks_ == 1 && !pad;
        if (!in_place) space.sums.grow((end - begin) * columns);
      }
      int64_t row = 0;  // in `sums`
      for (size_t i = 0; i < space.used; i++) {
        const Alike<Unit, Out>& alike = space.alike[i];
        clip(alike.stretches, first, last, space.clipped);
        if (in_place) {
          multiply_all<Out>(alike, feature, space, block, chunk > 0, [](int64_t, Out* y) { return y; });
        } else {
          multiply_all<float>(alike, 0, space, block, chunk > 0,
                              [&](int64_t pixel, Out*) { return space.sums.data() + (row + pixel) * columns; });
        }
        if (pad) {
          clip(missing(alike), first, last, space.clipped);
          const Memory<Unit> zeros = zero_units();
          Alike<Unit, Out> outside = alike;
          for (auto& pixel : outside.pixels) pixel.x = zeros.data();
          if (in_place) {
            multiply_all<Out>(outside, feature, space, block, true, [](int64_t, Out* y) { return y; });
          } else {
            multiply_all<float>(outside, 0, space, block, true,
                                [&](int64_t pixel, Out*) { return space.sums.data() + (row + pixel) * columns; });
          }
        }
        row += static_cast<int64_t>(alike.pixels.size());
      }
    }
    if (!in_place) store_sums(space, feature, block);
  }

  const Tap& tap(int axis, int64_t i) const { return axes_[axis].taps[static_cast<size_t>(i)]; }

  // Groups the output pixels begin to end by their taps.
  void find_pixels(Space& space, int64_t begin, int64_t end, int64_t group) {
    space.used = 0;
    const int64_t width = g_.out[2], stride = g_.groups * units_;
    for (int64_t row = begin / width; row * width < end; row++) {
      const int64_t y = row % g_.out[1], z = row / g_.out[1] % g_.out[0], n = row / g_.out[1] / g_.out[0];
      const int64_t x_begin = std::max<int64_t>(0, begin - row * width), x_end = std::min(width, end - row * width);
      const int32_t z_run = axes_[0].run[z], y_run = axes_[1].run[y];
      const Run &zs = axes_[0].runs[z_run], &ys = axes_[1].runs[y_run];
      for (size_t x_run = 0; x_run < axes_[2].runs.size(); x_run++) {
        const Run& xs = axes_[2].runs[x_run];
        const int64_t from = std::max<int64_t>(0, ceil_divide(x_begin - xs.first, xs.step));
        const int64_t to = std::min(xs.count, ceil_divide(x_end - xs.first, xs.step));
        if (from >= to) continue;
        Alike<Unit, Out>& alike = space.find(z_run, y_run, static_cast<int64_t>(x_run));
        if (alike.pixels.empty()) find_stretches(alike);
        // The first tap, if any, is inside the input.
        int64_t input = 0;
        const bool reads = zs.begin < zs.end && ys.begin < ys.end && xs.begin < xs.end;
        if (reads) {
          const int64_t z_in = tap(0, zs.begin).input + zs.moved + zs.stride * ((z - zs.first) / zs.step);
          const int64_t y_in = tap(1, ys.begin).input + ys.moved + ys.stride * ((y - ys.first) / ys.step);
          const int64_t x_in = tap(2, xs.begin).input + xs.moved;
          input = ((n * g_.in[0] + z_in) * g_.in[1] + y_in) * g_.in[2] + x_in;
        }
        const int64_t step = reads ? xs.stride : 0;
        for (int64_t j = from; j < to; j++) {
          alike.pixels.push_back({x_ + (input + step * j) * stride + group * units_,
                                  y_ + (row * width + xs.first + xs.step * j) * g_.features});
        }
      }
    }
  }

  // The taps of these pixels; those whose inputs lie behind each other are one stretch.
  void find_stretches(Alike<Unit, Out>& alike) {
    alike.stretches.clear();
    const Run &zs = axes_[0].runs[alike.runs[0]], &ys = axes_[1].runs[alike.runs[1]],
              &xs = axes_[2].runs[alike.runs[2]];
    const int64_t stride = g_.groups * units_;
    for (int64_t z = zs.begin; z < zs.end; z++)
      for (int64_t y = ys.begin; y < ys.end; y++)
        for (int64_t x = xs.begin; x < xs.end; x++) {
          const Tap &tz = tap(0, z), &ty = tap(1, y), &tx = tap(2, x);
          const int64_t rows = (tz.input - tap(0, zs.begin).input) * g_.in[1] + ty.input - tap(1, ys.begin).input;
          const int64_t offset = (rows * g_.in[2] + tx.input - tap(2, xs.begin).input) * stride;
          append(alike.stretches, {offset, position(tz.index, ty.index, tx.index) * units_, units_});
        }
  }

  static void append(std::vector<Stretch>& stretches, const Stretch& next) {
    if (!stretches.empty()) {
      Stretch& last = stretches.back();
      if (last.offset + last.length == next.offset && last.row + last.length == next.row) {
        last.length += next.length;
        return;
      }
    }
    stretches.push_back(next);
  }

  int64_t position(int64_t z, int64_t y, int64_t x) const { return (z * g_.window[1] + y) * g_.window[2] + x; }

  // The taps that these pixels do not have. Their inputs are all the same zeros.
  std::vector<Stretch> missing(const Alike<Unit, Out>& alike) const {
    std::vector<char> there(static_cast<size_t>(g_.taps()), 0);
    const Run &zs = axes_[0].runs[alike.runs[0]], &ys = axes_[1].runs[alike.runs[1]],
              &xs = axes_[2].runs[alike.runs[2]];
    for (int64_t z = zs.begin; z < zs.end; z++)
      for (int64_t y = ys.begin; y < ys.end; y++)
        for (int64_t x = xs.begin; x < xs.end; x++)
          there[static_cast<size_t>(position(tap(0, z).index, tap(1, y).index, tap(2, x).index))] = 1;
    std::vector<Stretch> stretches;
    for (int64_t i = 0; i < g_.taps(); i++)
      if (!there[static_cast<size_t>(i)]) stretches.push_back({0, i * units_, units_});
    return stretches;
  }

  Memory<Unit> zero_units() const {
    Memory<Unit> zeros(std::max<int64_t>(1, units_));
    std::memset(static_cast<void*>(zeros.data()), 0, static_cast<size_t>(units_) * sizeof(Unit));
    return zeros;
  }

  // The parts of stretches within the packed rows first to last.
  static void clip(const std::vector<Stretch>& stretches, int64_t first, int64_t last, std::vector<Stretch>& clipped) {
    clipped.clear();
    for (const Stretch& all : stretches) {
      const int64_t begin = std::max(all.row, first), end = std::min(all.row + all.length, last);
      if (begin < end) clipped.push_back({all.offset + begin - all.row, begin - first, end - begin});
    }
  }

  template <class Sum, class Place>
  void multiply_all(const Alike<Unit, Out>& alike, int64_t feature, const Space& space, const Blocks::Block& block,
                    bool accumulate, Place&& place) {
    const auto count = static_cast<int64_t>(space.clipped.size());
    if (accumulate && count == 0) return;
    split(static_cast<int64_t>(alike.pixels.size()), [&](int64_t begin, int64_t size) {
      Pixel<Unit, Sum> rows[ROWS];
      for (int64_t m = 0; m < size; m++) {
        const Pixel<Unit, Out>& pixel = alike.pixels[static_cast<size_t>(begin + m)];
        rows[m] = {pixel.x, place(begin + m, pixel.y)};
      }
      MULTIPLY<Unit, Sum>[tile(size, block.vectors)](rows, feature, space.clipped.data(), count, space.panel.data(),
                                                     block.lanes, accumulate);
    });
  }

  void store_sums(const Space& space, int64_t feature, const Blocks::Block& block) {
    const float* sums = space.sums.data();
    for (size_t i = 0; i < space.used; i++)
      for (const Pixel<Unit, Out>& pixel : space.alike[i].pixels)
        for (int64_t n = 0; n < block.vectors; n++, sums += WIDTH)
          store(pixel.y + feature + n * WIDTH, load(sums), n == block.vectors - 1 ? block.lanes : WIDTH);
  }

  // Packs the rows first to last of the contraction, [rows, vectors * WIDTH]. Returns whether they are finite.
  bool pack(Unit* panel, int64_t first, int64_t last, int64_t group, const Blocks::Block& block) {
    Finite finite;
    for (int64_t row = first; row < last;) {
      const int64_t tap = row / units_, unit = row % units_, count = std::min(units_ - unit, last - row);
      if (g_.transposed) pack_transposed(panel, tap, unit, count, group, block, finite);
      else pack_rows(panel, tap, unit, count, group, block, finite);
      panel += count * block.vectors * WIDTH;
      row += count;
    }
    return finite.all();
  }

  int64_t weight_position(int64_t tap) const {
    return g_.flipped ? g_.taps() - 1 - tap : tap;  // reversed in each axis
  }

  // w [taps, group channels, features]
  void pack_rows(Unit* to, int64_t tap, int64_t unit, int64_t count, int64_t group, const Blocks::Block& block,
                 Finite& finite) {
    using Read = Reader<Unit, Weight>;
    const int64_t channels = g_.group_channels();
    const Weight* from = w_ + weight_position(tap) * channels * g_.features + group * g_.group_features() + block.begin;
    for (int64_t i = unit; i < unit + count; i++) {
      const int64_t channel = i * Read::CHANNELS;
      for (int64_t n = 0; n < block.vectors; n++, to += WIDTH) {
        const Words units = Read::across(from + channel * g_.features + n * WIDTH, g_.features, channels - channel,
                                         n == block.vectors - 1 ? block.lanes : WIDTH);
        finite.check(Unit(), units);
        std::memcpy(static_cast<void*>(to), &units, sizeof(units));
      }
    }
  }

  // w [taps, group features, channels]
  void pack_transposed(Unit* to, int64_t tap, int64_t unit, int64_t count, int64_t group, const Blocks::Block& block,
                       Finite& finite) {
    using Read = Reader<Unit, Weight>;
    const int64_t channels = g_.group_channels();
    const Weight* from =
        w_ + (weight_position(tap) * g_.group_features() + block.begin) * g_.channels + group * channels;
    for (int64_t n = 0; n < block.vectors; n++) {
      const int64_t features = n == block.vectors - 1 ? block.lanes : WIDTH;
      for (int64_t i = 0; i < count; i += WIDTH) {
        const int64_t channel = (unit + i) * Read::CHANNELS;
        Words square[WIDTH] = {};
        for (int64_t f = 0; f < features; f++) {
          square[f] = Read::along(from + (n * WIDTH + f) * g_.channels + channel, channels - channel);
          finite.check(Unit(), square[f]);
        }
        transpose(square);
        for (int64_t k = 0; k < std::min<int64_t>(WIDTH, count - i); k++)
          std::memcpy(static_cast<void*>(to + ((i + k) * block.vectors + n) * WIDTH), &square[k], sizeof(Words));
      }
    }
  }

  Pool& pool_;
  const Geometry& g_;
  const Unit* const x_;
  const Weight* const w_;
  Out* const y_;
  const int64_t units_;
  const Axis axes_[3];
  const Blocks blocks_;
  const int64_t contraction_, chunks_;
};

// ---- the kernel's gradient

constexpr int64_t CHUNK = 128;  // pixels whose gradients stay in the nearest cache: 32 kB with AVX-512

// A task adds up rows of the gradient, which are the channels of a tap. The taps of a row of the window that
// read neighbors are one tap with `window * channels` channels (`merged_`): fewer tiles are incomplete.
template <class Unit, class Out>
class KernelGradient {
 public:
  // x [examples, in, channels] and dy [examples, out, features].
  KernelGradient(Pool& pool, const Geometry& geometry, int64_t examples, const Unit* x, const Unit* dy, Out* dw)
      : pool_(pool),
        g_(geometry),
        x_(x),
        dy_(dy),
        dw_(dw),
        pixels_(examples * geometry.out[0] * geometry.out[1] * geometry.out[2]),
        blocks_(geometry.group_features()),
        size_(geometry.taps() * geometry.group_channels() * geometry.features),
        merged_(merges()),
        steps_(merged_ ? 1 : geometry.window[2]),
        rows_(geometry.group_channels() * (merged_ ? geometry.window[2] : 1)) {
    for (int axis = 0; axis < 2; axis++)
      for (int64_t k = 0; k < g_.window[axis]; k++) ranges_[axis].push_back(inside(axis, k));
    for (int64_t k = 0; k < steps_; k++) {
      const Range first = inside(2, k), last = merged_ ? inside(2, g_.window[2] - 1) : first;
      ranges_[2].push_back({std::max(first.begin, last.begin), std::min(first.end, last.end)});
    }
  }

  void run() {
    const int64_t threads = pool_.threads(), columns = g_.groups * blocks_.count;
    // The part of the gradient that a task adds to should stay in the second cache.
    const int64_t bytes = g_.taps() * g_.group_channels() * BLOCK * static_cast<int64_t>(sizeof(float));
    const int64_t wanted = threads == 1 ? 1 : ceil_divide(4 * threads, columns);
    const int64_t slices =
        std::clamp<int64_t>(std::max(wanted, ceil_divide(bytes, 1 << 19)), 1, ceil_divide(rows_, 4 * ROWS));
    // Few weights: each task adds up a part of the pixels, in memory of its own.
    const bool few = size_ * static_cast<int64_t>(sizeof(float)) <= 1 << 20;
    const int64_t most = few ? std::max<int64_t>(1, pixels_ / (4 * CHUNK)) : 1;
    const int64_t parts = std::min(most, ceil_divide(wanted, slices));
    const bool in_place = std::is_same<Out, float>::value && parts == 1;
    const Memory<float> sums(in_place ? 0 : parts * size_);
    float* const first = in_place ? reinterpret_cast<float*>(dw_) : sums.data();
    parallel(pool_, parts * slices * columns, [&](int64_t task) {
      const int64_t column = task % columns, slice = task / columns % slices, part = task / columns / slices;
      compute(first + part * size_, pixels_ * part / parts, pixels_ * (part + 1) / parts, column / blocks_.count,
              blocks_[column % blocks_.count], rows_ * slice / slices, rows_ * (slice + 1) / slices);
    });
    if (in_place) return;
    const int64_t pieces = ceil_divide(size_, 4096);
    parallel(pool_, pieces, [&](int64_t piece) {
      for (int64_t i = piece * 4096; i < std::min(size_, (piece + 1) * 4096); i++) {
        float sum = sums[i];
        for (int64_t part = 1; part < parts; part++) sum += sums[part * size_ + i];
        dw_[i] = narrow<Out>(sum);
      }
    });
  }

 private:
  struct Range {
    int64_t begin, end;
  };
  using Contributions = std::vector<Contribution<Unit>>;

  // The outputs for which this position of the window is inside the input.
  Range inside(int axis, int64_t k) const {
    const int64_t first = k * g_.w_dilation[axis] - g_.low[axis];
    const int64_t begin = std::clamp<int64_t>(ceil_divide(-first, g_.strides[axis]), 0, g_.out[axis]);
    const int64_t end = std::clamp<int64_t>(ceil_divide(g_.in[axis] - first, g_.strides[axis]), 0, g_.out[axis]);
    return {begin, std::max(begin, end)};
  }

  // Merged taps fill more tiles, and separate taps leave out the padding: whichever is less work.
  bool merges() const {
    if (g_.groups > 1 || g_.window[2] == 1 || g_.w_dilation[2] > 1 || !g_.multiplies_padding(true)) return false;
    int64_t separate = 0;
    for (int64_t k = 0; k < g_.window[2]; k++) separate += inside(2, k).end - inside(2, k).begin;
    const int64_t merged = ceil_divide(g_.window[2] * g_.channels, ROWS) * g_.out[2];
    return merged * 15 / 16 <= ceil_divide(g_.channels, ROWS) * separate;
  }

  int64_t input(int axis, int64_t output, int64_t k) const {
    return output * g_.strides[axis] + k * g_.w_dilation[axis] - g_.low[axis];
  }

  void compute(float* dw, int64_t begin, int64_t end, int64_t group, const Blocks::Block& block, int64_t first,
               int64_t last) const {
    const int64_t taps = g_.window[0] * g_.window[1] * steps_, feature = group * g_.group_features() + block.begin;
    const int64_t columns = block.vectors * WIDTH;
    const Memory<Unit> panel(CHUNK * columns);
    std::vector<Contributions> contributions(static_cast<size_t>(taps));
    std::vector<char> started(static_cast<size_t>(taps), 0);
    Patches patches(*this);
    for (int64_t chunk = begin; chunk < end; chunk += CHUNK) {
      const int64_t chunk_end = std::min(end, chunk + CHUNK);
      const bool finite = pack(panel.data(), dy_ + feature, chunk, chunk_end, block);
      const bool pad = !finite && g_.multiplies_padding(true);
      patches.used = 0;
      for (int64_t tap = 0; tap < taps; tap++)
        find(contributions[static_cast<size_t>(tap)], patches, panel.data(), columns, chunk, chunk_end, group, tap, pad);
      split(last - first, [&](int64_t row, int64_t size) {
        for (int64_t tap = 0; tap < taps; tap++) {
          const Contributions& list = contributions[static_cast<size_t>(tap)];
          if (list.empty()) continue;
          float* to = dw + (tap * rows_ + first + row) * g_.features + feature;
          CONTRIBUTE<Unit>[tile(size, block.vectors)](list.data(), static_cast<int64_t>(list.size()), first + row, to,
                                                      g_.features, block.lanes, started[static_cast<size_t>(tap)]);
        }
      });
      for (size_t tap = 0; tap < started.size(); tap++) started[tap] |= !contributions[tap].empty();
    }
    for (int64_t tap = 0; tap < taps; tap++) {
      if (started[static_cast<size_t>(tap)]) continue;
      for (int64_t row = first; row < last; row++) {
        float* to = dw + (tap * rows_ + row) * g_.features + feature;
        std::fill(to, to + block.size, 0.0f);
      }
    }
  }

  // The rows of pixels at a border of merged taps, with zeros outside the input. The first is all zeros.
  struct Patches {
    const int64_t rows;
    Memory<Unit> memory;
    int64_t used = 0;

    explicit Patches(const KernelGradient& of) : rows(of.rows_) {
      const int64_t width = std::max<int64_t>(1, of.g_.out[2]);
      const int64_t borders = width - (of.ranges_[2][0].end - of.ranges_[2][0].begin);
      const int64_t lines = std::min(CHUNK / width + 2, CHUNK), taps = of.g_.window[0] * of.g_.window[1];
      memory.grow(rows * (1 + (of.merged_ ? std::min(lines * borders, CHUNK) * taps : 0)));
      std::memset(static_cast<void*>(memory.data()), 0, static_cast<size_t>(rows) * sizeof(Unit));
    }
    const Unit* zeros() const { return memory.data(); }
    Unit* next() {
      Unit* patch = memory.data() + ++used * rows;
      std::memset(static_cast<void*>(patch), 0, static_cast<size_t>(rows) * sizeof(Unit));
      return patch;
    }
  };

  // Copies the block's features of the pixels begin to end behind each other. Returns whether they are finite.
  bool pack(Unit* panel, const Unit* dy, int64_t begin, int64_t end, const Blocks::Block& block) const {
    Finite finite;
    for (int64_t pixel = begin; pixel < end; pixel++)
      for (int64_t n = 0; n < block.vectors; n++, panel += WIDTH) {
        const Unit* from = dy + pixel * g_.features + n * WIDTH;
        const auto values = n == block.vectors - 1 && block.lanes < WIDTH ? load(from, block.lanes) : load(from);
        finite.check(Unit(), bits_of<Words>(values));
        std::memcpy(static_cast<void*>(panel), &values, sizeof(values));
      }
    return finite.all();
  }

  // Lists the pixels begin to end at a tap. Those outside the input are left out, or are zeros if `pad`.
  // `panel` holds their gradients, `step` units each.
  void find(Contributions& contributions, Patches& patches, const Unit* panel, int64_t step, int64_t begin,
            int64_t end, int64_t group, int64_t tap, bool pad) const {
    contributions.clear();
    const int64_t kx = tap % steps_, ky = tap / steps_ % g_.window[1], kz = tap / steps_ / g_.window[1];
    const Range &zs = ranges_[0][static_cast<size_t>(kz)], &ys = ranges_[1][static_cast<size_t>(ky)],
                &xs = ranges_[2][static_cast<size_t>(kx)];
    const int64_t width = g_.out[2];
    for (int64_t line = begin / width; line * width < end; line++) {
      const int64_t y = line % g_.out[1], z = line / g_.out[1] % g_.out[0], n = line / g_.out[1] / g_.out[0];
      const int64_t from = std::max<int64_t>(0, begin - line * width), to = std::min(width, end - line * width);
      const bool there = zs.begin <= z && z < zs.end && ys.begin <= y && y < ys.end;
      if (!there && !pad) continue;
      const int64_t x_from = there ? std::clamp(xs.begin, from, to) : to;
      const int64_t x_to = there ? std::clamp(xs.end, x_from, to) : to;
      const int64_t pixel = there ? ((n * g_.in[0] + input(0, z, kz)) * g_.in[1] + input(1, y, ky)) * g_.in[2] : 0;
      const Unit* values = x_ + pixel * g_.channels + group * g_.group_channels();
      const Unit* gradient = panel + (line * width - begin) * step;
      const auto outside = [&](int64_t x) {
        if (merged_ && there) contributions.push_back({patch(patches, values, x), gradient + x * step});
        else if (pad) contributions.push_back({patches.zeros(), gradient + x * step});
      };
      for (int64_t x = from; x < x_from; x++) outside(x);
      for (int64_t x = x_from; x < x_to; x++)
        contributions.push_back({values + input(2, x, kx) * g_.channels, gradient + x * step});
      for (int64_t x = x_to; x < to; x++) outside(x);
    }
  }

  const Unit* patch(Patches& patches, const Unit* values, int64_t x) const {
    const int64_t first = input(2, x, 0), begin = std::max<int64_t>(0, first);
    const int64_t end = std::min(g_.in[2], first + g_.window[2]);
    if (begin >= end) return patches.zeros();
    Unit* patch = patches.next();
    std::memcpy(static_cast<void*>(patch + (begin - first) * g_.channels), values + begin * g_.channels,
                static_cast<size_t>((end - begin) * g_.channels) * sizeof(Unit));
    return patch;
  }

  Pool& pool_;
  const Geometry& g_;
  const Unit* const x_;
  const Unit* const dy_;
  Out* const dw_;
  const int64_t pixels_;
  const Blocks blocks_;
  const int64_t size_;
  const bool merged_;
  const int64_t steps_;  // of the window along the last axis
  const int64_t rows_;   // of the gradient at a tap
  std::vector<Range> ranges_[3];
};

// ---- arrays in the form that the tiles read

constexpr int64_t PIECE = 4096;  // values of a task that copies

#if defined(FNET_PAIRS)
// Makes pairs of channels: [rows, channels] to [rows, ceil(channels / 2)], for an odd number of channels.
inline Memory<Pair> padded(Pool& pool, const bfloat16* from, int64_t rows, int64_t channels) {
  const int64_t units = ceil_divide(channels, 2), size = std::max<int64_t>(1, PIECE / units);
  Memory<Pair> to(rows * units);
  parallel(pool, ceil_divide(rows, size), [&](int64_t piece) {
    for (int64_t row = piece * size; row < std::min(rows, (piece + 1) * size); row++) {
      Pair* pairs = to.data() + row * units;
      std::memset(static_cast<void*>(pairs + units - 1), 0, sizeof(Pair));
      std::memcpy(static_cast<void*>(pairs), from + row * channels, static_cast<size_t>(channels) * sizeof(bfloat16));
    }
  });
  return to;
}

// Makes pairs of every two examples: [examples, size] to [ceil(examples / 2), size].
inline Memory<Pair> paired(Pool& pool, const bfloat16* from, int64_t examples, int64_t size) {
  const int64_t pairs = ceil_divide(examples, 2), pieces = ceil_divide(size, PIECE);
  Memory<Pair> to(pairs * size);
  parallel(pool, pairs * pieces, [&](int64_t task) {
    const int64_t pair = task / pieces, begin = task % pieces * PIECE, end = std::min(size, begin + PIECE);
    const bfloat16* low = from + 2 * pair * size;
    const bfloat16* high = 2 * pair + 1 < examples ? low + size : nullptr;
    Pair* units = to.data() + pair * size;
    for (int64_t i = begin; i < end; i++) units[i] = {{low[i], high == nullptr ? bfloat16{0} : high[i]}};
  });
  return to;
}
#else
inline Memory<float> widened(Pool& pool, const bfloat16* from, int64_t count) {
  Memory<float> to(count);
  parallel(pool, ceil_divide(count, PIECE), [&](int64_t piece) {
    const int64_t begin = piece * PIECE, end = std::min(count, begin + PIECE);
    int64_t i = begin;
    for (; i + WIDTH <= end; i += WIDTH) store(to.data() + i, load(from + i));
    for (; i < end; i++) to[i] = widen(from[i]);
  });
  return to;
}
#endif

// ---- what a handler calls

inline void product(Pool& pool, const Geometry& g, const float* x, const float* w, float* y) {
  if (g.pixels() * g.features == 0) return;
  Product<float, float, float>(pool, g, x, g.group_channels(), w, y).run();
}

template <class Out>
void product(Pool& pool, const Geometry& g, const bfloat16* x, const bfloat16* w, Out* y) {
  if (g.pixels() * g.features == 0) return;
  const int64_t channels = g.group_channels();
#if defined(FNET_PAIRS)
  const bool even = channels % 2 == 0;
  const Memory<Pair> copy = even ? Memory<Pair>() : padded(pool, x, g.in_pixels() * g.groups, channels);
  const Pair* pairs = even ? reinterpret_cast<const Pair*>(x) : copy.data();
  Product<Pair, bfloat16, Out>(pool, g, pairs, ceil_divide(channels, 2), w, y).run();
#else
  const Memory<float> copy = widened(pool, x, g.in_pixels() * g.channels);
  Product<float, bfloat16, Out>(pool, g, copy.data(), channels, w, y).run();
#endif
}

inline void kernel_gradient(Pool& pool, const Geometry& g, const float* x, const float* dy, float* dw) {
  if (g.taps() * g.group_channels() * g.features == 0) return;
  KernelGradient<float, float>(pool, g, g.batch, x, dy, dw).run();
}

template <class Out>
void kernel_gradient(Pool& pool, const Geometry& g, const bfloat16* x, const bfloat16* dy, Out* dw) {
  if (g.taps() * g.group_channels() * g.features == 0) return;
#if defined(FNET_PAIRS)
  const int64_t in = g.in[0] * g.in[1] * g.in[2] * g.channels, out = g.out[0] * g.out[1] * g.out[2] * g.features;
  const Memory<Pair> x_pairs = paired(pool, x, g.batch, in), dy_pairs = paired(pool, dy, g.batch, out);
  KernelGradient<Pair, Out>(pool, g, ceil_divide(g.batch, 2), x_pairs.data(), dy_pairs.data(), dw).run();
#else
  const Memory<float> x_copy = widened(pool, x, g.in_pixels() * g.channels);
  const Memory<float> dy_copy = widened(pool, dy, g.pixels() * g.features);
  KernelGradient<float, Out>(pool, g, g.batch, x_copy.data(), dy_copy.data(), dw).run();
#endif
}

}  // namespace convolution
}  // namespace fnet
