// Runs the kernels of convolutions and of products of a few rows on threads of the standard library, to be
// built with a sanitizer, and compares them with loops. Arrays have their exact sizes, so that the address sanitizer sees each access
// beyond an end.
//
//   sanitize SEED CASES    prints what differs; the exit code is 1 if anything does

#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "convolution.h"
#include "skinny.h"

using fnet::bfloat16;
using fnet::convolution::Geometry;

namespace {

// Threads that live as long as the pool, as those of XLA.
class Threads {
 public:
  explicit Threads(int count) {
    for (int i = 0; i < count; i++) threads_.emplace_back([this] { serve(); });
  }
  ~Threads() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }
  template <class Work>
  void Schedule(Work work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.emplace_back(work);
    }
    changed_.notify_one();
  }

 private:
  void serve() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
      if (queue_.empty()) return;
      auto work = std::move(queue_.back());
      queue_.pop_back();
      lock.unlock();
      work();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> queue_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

using Random = std::mt19937;

int64_t draw(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

template <class Value>
std::vector<Value> values(Random& random, int64_t count, bool with_nan) {
  std::normal_distribution<float> normal;
  std::vector<Value> drawn;
  drawn.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; i++) drawn.push_back(fnet::narrow<Value>(normal(random)));
  if (with_nan && count > 0) {
    const float bad = draw(random, 0, 1) ? NAN : std::numeric_limits<float>::infinity();
    drawn[static_cast<size_t>(draw(random, 0, count - 1))] = fnet::narrow<Value>(bad);
  }
  return drawn;
}

Geometry geometry(Random& random, int kind) {
  Geometry g = {};
  g.batch = draw(random, 0, 20) == 0 ? 0 : draw(random, 1, 5);
  g.groups = draw(random, 0, 3) == 0 ? draw(random, 2, 3) : 1;
  const bool wide = draw(random, 0, 3) == 0;
  g.channels = g.groups * draw(random, draw(random, 0, 9) == 0 ? 0 : 1, wide ? 70 : 9);
  g.features = g.groups * draw(random, 1, wide ? 150 : 20);
  const int64_t axes = draw(random, 1, 3);
  for (int axis = 0; axis < 3; axis++) {
    const bool used = axis >= 3 - axes;
    g.in[axis] = used ? draw(random, 1, axes == 3 ? 5 : 11) : 1;
    g.window[axis] = used ? draw(random, 1, 4) : 1;
    g.x_dilation[axis] = used && kind == 0 && draw(random, 0, 2) == 0 ? draw(random, 2, 3) : 1;
    g.strides[axis] = used && g.x_dilation[axis] == 1 && draw(random, 0, 2) == 0 ? draw(random, 2, 3) : 1;
    g.w_dilation[axis] = used && draw(random, 0, 2) == 0 ? 2 : 1;
    g.low[axis] = used ? draw(random, -2, 4) : 0;
    g.out[axis] = used ? draw(random, draw(random, 0, 9) == 0 ? 0 : 1, axes == 3 ? 6 : 12) : 1;
  }
  g.flipped = kind == 0 && draw(random, 0, 1);
  g.transposed = kind == 0 && draw(random, 0, 1);
  return g;
}

// Calls body(pixel of x or -1 where there is none, pixel of y, position in the window).
template <class Body>
void each_tap(const Geometry& g, int kind, Body&& body) {
  for (int64_t n = 0; n < g.batch; n++)
    for (int64_t o = 0; o < g.out[0] * g.out[1] * g.out[2]; o++)
      for (int64_t tap = 0; tap < g.taps(); tap++) {
        const int64_t at[3] = {o / g.out[2] / g.out[1], o / g.out[2] % g.out[1], o % g.out[2]};
        const int64_t k[3] = {tap / g.window[2] / g.window[1], tap / g.window[2] % g.window[1], tap % g.window[2]};
        int64_t x = n;
        for (int axis = 0; axis < 3; axis++) {
          const int64_t position = at[axis] * g.strides[axis] + k[axis] * g.w_dilation[axis] - g.low[axis];
          const int64_t dilation = g.x_dilation[axis];
          const bool inside = position >= 0 && position % dilation == 0 && position / dilation < g.in[axis];
          x = x < 0 || !inside ? -1 : x * g.in[axis] + position / dilation;
        }
        if (x >= 0 || g.multiplies_padding(kind == 1)) body(x, n * g.out[0] * g.out[1] * g.out[2] + o, tap);
      }
}

template <class Value>
std::vector<double> expected(const Geometry& g, int kind, const std::vector<Value>& x, const std::vector<Value>& other,
                             size_t size) {
  std::vector<double> result(size, 0.0);
  const int64_t channels = g.group_channels(), features = g.group_features();
  each_tap(g, kind, [&](int64_t in, int64_t out, int64_t tap) {
    const int64_t position = g.flipped ? g.taps() - 1 - tap : tap;
    for (int64_t f = 0; f < g.features; f++)
      for (int64_t c = 0; c < channels; c++) {
        const int64_t group = f / features, channel = group * channels + c;
        const double value = in < 0 ? 0.0 : fnet::widen(x[static_cast<size_t>(in * g.channels + channel)]);
        const int64_t weight = g.transposed ? (position * features + f % features) * g.channels + channel
                                            : (position * channels + c) * g.features + f;
        if (kind == 0)
          result[static_cast<size_t>(out * g.features + f)] +=
              value * fnet::widen(other[static_cast<size_t>(weight)]);
        else
          result[static_cast<size_t>((tap * channels + c) * g.features + f)] +=
              value * fnet::widen(other[static_cast<size_t>(out * g.features + f)]);
      }
  });
  return result;
}

// Whether all values are as near to each other as their type allows; NaN and infinities at the same places.
template <class Value>
bool near(const std::vector<Value>& result, const std::vector<double>& reference) {
  double scale = 0;
  for (double value : reference)
    if (std::isfinite(value)) scale = std::max(scale, std::abs(value));
  const double tolerance = scale * (sizeof(Value) == 2 ? 1e-2 : 1e-5);
  for (size_t i = 0; i < reference.size(); i++) {
    const double value = fnet::widen(result[i]);
    if (std::isnan(reference[i]) ? !std::isnan(value)
        : std::isinf(reference[i]) ? value != reference[i] : !(std::abs(value - reference[i]) <= tolerance))
      return false;
  }
  return true;
}

template <class Value, class Result>
bool check(Random& random, fnet::Pool& pool, int kind) {
  const Geometry g = geometry(random, kind);
  const int64_t weights = g.taps() * g.group_channels() * g.features;
  const bool with_nan = draw(random, 0, 2) == 0;
  const auto x = values<Value>(random, g.in_pixels() * g.channels, with_nan && draw(random, 0, 3) == 0);
  const auto other = values<Value>(random, kind == 0 ? weights : g.pixels() * g.features, with_nan);
  const auto size = static_cast<size_t>(kind == 0 ? g.pixels() * g.features : weights);
  std::vector<Result> first(size, fnet::narrow<Result>(7)), second(size, fnet::narrow<Result>(9));
  for (auto* result : {&first, &second}) {
    if (kind == 0) fnet::convolution::product(pool, g, x.data(), other.data(), result->data());
    else fnet::convolution::kernel_gradient(pool, g, x.data(), other.data(), result->data());
  }
  const bool equal = size == 0 || std::memcmp(first.data(), second.data(), size * sizeof(Result)) == 0;
  const bool right = near(first, expected(g, kind, x, other, size));
  if (equal && right) return true;
  std::printf("%s: kind %d, %zu to %zu bytes, batch %ld, %ld to %ld channels, %ld groups, nan %d\n",
              right ? "two calls differ" : "wrong", kind, sizeof(Value), sizeof(Result), static_cast<long>(g.batch),
              static_cast<long>(g.channels), static_cast<long>(g.features), static_cast<long>(g.groups), with_nan);
  for (int i = 0; i < 3; i++)
    std::printf("  in %ld, out %ld, window %ld, stride %ld, low %ld, dilations %ld and %ld\n",
                static_cast<long>(g.in[i]), static_cast<long>(g.out[i]), static_cast<long>(g.window[i]),
                static_cast<long>(g.strides[i]), static_cast<long>(g.low[i]), static_cast<long>(g.x_dilation[i]),
                static_cast<long>(g.w_dilation[i]));
  return false;
}

template <class Weight>
bool check_product(Random& random, fnet::Pool& pool) {
  const int64_t rows = draw(random, 0, 20), inputs = draw(random, 0, 90);
  const int64_t outputs = draw(random, 0, draw(random, 0, 1) ? 20 : 600);
  const bool wide = draw(random, 0, 1) != 0;
  const auto x = values<float>(random, rows * inputs, draw(random, 0, 3) == 0);
  const auto w = values<Weight>(random, inputs * outputs, false);
  std::vector<float> y(static_cast<size_t>(rows * outputs), 7);
  std::vector<double> reference(y.size(), 0.0);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t n = 0; n < outputs; n++)
      for (int64_t k = 0; k < inputs; k++)
        reference[static_cast<size_t>(r * outputs + n)] +=
            static_cast<double>(x[static_cast<size_t>(r * inputs + k)]) *
            fnet::widen(w[static_cast<size_t>(wide ? k * outputs + n : n * inputs + k)]);
  fnet::skinny_product<Weight>(pool, {rows, inputs, outputs, x.data(), w.data(), y.data()}, wide);
  if (near(y, reference)) return true;
  std::printf("wrong product: [%ld, %ld] and %ld outputs, wide %d\n", static_cast<long>(rows),
              static_cast<long>(inputs), static_cast<long>(outputs), wide);
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  Random random(static_cast<unsigned>(std::atoi(argv[1])));
  int wrong = 0;
  Threads one(1), four(4);
  fnet::Borrowed<Threads> alone(one), many(four);
  for (int i = 0; i < std::atoi(argv[2]); i++) {
    fnet::Pool& pool = i % 2 ? static_cast<fnet::Pool&>(many) : alone;
    const int kind = i / 2 % 2;
    if (i % 5 == 4) {
      wrong += i % 2 ? !check_product<float>(random, pool) : !check_product<bfloat16>(random, pool);
      continue;
    }
    switch (i / 4 % 3) {
      case 0: wrong += !check<float, float>(random, pool, kind); break;
      case 1: wrong += !check<bfloat16, float>(random, pool, kind); break;
      default: wrong += !check<bfloat16, bfloat16>(random, pool, kind);
    }
  }
  std::printf("%d of %s differ\n", wrong, argv[2]);
  return wrong > 0;
}
