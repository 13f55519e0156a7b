// The recurrent kernels as custom calls of XLA. An operand or a result without elements is not given.
#include "recurrent.h"

#include <exception>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace fnet {
namespace recurrent {
namespace {

namespace ffi = ::xla::ffi;

// Reads the buffers of a call in order.
class Operands {
 public:
  explicit Operands(ffi::RemainingArgs& buffers) : buffers_(buffers) {}
  ffi::AnyBuffer next() { return buffers_.get<ffi::AnyBuffer>(index_++).value(); }

  template <class T>
  const T* data() {
    const ffi::AnyBuffer buffer = next();
    return buffer.element_count() ? static_cast<const T*>(buffer.untyped_data()) : nullptr;
  }

  template <class T, size_t COUNT>
  std::array<const T*, COUNT> arrays() {
    std::array<const T*, COUNT> all;
    for (auto& each : all) each = data<T>();
    return all;
  }

 private:
  ffi::RemainingArgs& buffers_;
  size_t index_ = 0;
};

class Results {
 public:
  explicit Results(ffi::RemainingRets& buffers) : buffers_(buffers) {}

  // Null for results that are not wanted.
  template <class T>
  T* data() {
    if (index_ >= buffers_.size()) return nullptr;
    ffi::AnyBuffer buffer = *buffers_.get<ffi::AnyBuffer>(index_++).value();
    return buffer.element_count() ? static_cast<T*>(buffer.untyped_data()) : nullptr;
  }

  template <class T, size_t COUNT>
  std::array<T*, COUNT> arrays() {
    std::array<T*, COUNT> all;
    for (auto& each : all) each = data<T>();
    return all;
  }

 private:
  ffi::RemainingRets& buffers_;
  size_t index_ = 0;
};

Sequence sequence(const ffi::AnyBuffer& shaped, int64_t last, bool reverse, bool rounded, const uint8_t* valid) {
  const auto sizes = shaped.dimensions();
  return {sizes[0], sizes[1], sizes[2] / last, reverse, rounded, valid};
}

template <class Cell, class Output>
void run_forward(Pool& pool, ffi::RemainingArgs& args, ffi::RemainingRets& rets, bool reverse, bool rounded) {
  Operands operands(args);
  Results results(rets);
  Forward<Cell, Output> call;
  const ffi::AnyBuffer inputs = operands.next();
  call.inputs = static_cast<const float*>(inputs.untyped_data());
  call.kernel = operands.data<float>();
  call.bias = operands.data<float>();
  call.recurrent_bias = operands.data<float>();
  static_cast<Sequence&>(call) = sequence(inputs, Cell::GATES, reverse, rounded, operands.data<uint8_t>());
  call.start = operands.arrays<float, Cell::STATES>();
  call.output = results.data<Output>();
  call.after = results.arrays<float, Cell::STATES>();
  call.before = results.arrays<float, Cell::STATES>();
  call.kept = results.arrays<float, 4>();
  forward(pool, call);
}

template <class Cell, class Output>
void run_gradient(Pool& pool, ffi::RemainingArgs& args, ffi::RemainingRets& rets, bool reverse) {
  Operands operands(args);
  Results results(rets);
  Gradient<Cell, Output> call;
  call.output = operands.data<Output>();
  call.kernel = operands.data<float>();
  const uint8_t* valid = operands.data<uint8_t>();
  const ffi::AnyBuffer hidden = operands.next();
  static_cast<Sequence&>(call) = sequence(hidden, 1, reverse, false, valid);
  call.before[0] = static_cast<const float*>(hidden.untyped_data());
  for (int i = 1; i < Cell::STATES; i++) call.before[i] = operands.data<float>();
  call.kept = operands.arrays<float, 4>();
  call.after = operands.arrays<float, Cell::STATES>();
  call.projected = results.data<float>();
  call.recurrent = Cell::SHARED ? call.projected : results.data<float>();
  call.start = results.arrays<float, Cell::STATES>();
  call.bias = results.data<float>();
  call.recurrent_bias = Cell::SHARED ? nullptr : results.data<float>();
  gradient(pool, call);
}

// Calls run(Output()) for the dtype of a buffer.
template <class Run>
ffi::Error with_type(ffi::AnyBuffer buffer, Run&& run) {
  try {
    if (buffer.element_type() == ffi::BF16) {
      run(bfloat16());
    } else {
      run(float());
    }
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("fnet's recurrent kernel: ") + error.what());
  }
  return ffi::Error::Success();
}

template <class Cell>
ffi::Error call_forward(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets, bool reverse,
                        bool rounded) {
  Borrowed<ffi::ThreadPool> pool(threads);
  return with_type(*rets.get<ffi::AnyBuffer>(0).value(), [&](auto output) {
    run_forward<Cell, decltype(output)>(pool, args, rets, reverse, rounded);
  });
}

template <class Cell>
ffi::Error call_gradient(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets, bool reverse) {
  Borrowed<ffi::ThreadPool> pool(threads);
  return with_type(args.get<ffi::AnyBuffer>(0).value(), [&](auto output) {
    run_gradient<Cell, decltype(output)>(pool, args, rets, reverse);
  });
}

}  // namespace
}  // namespace recurrent
}  // namespace fnet

#define FNET_FORWARD(name, Cell)                                                                            \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* frame);          \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, fnet::recurrent::call_forward<fnet::recurrent::Cell>,                                       \
                                xla::ffi::Ffi::Bind()                                                       \
                                    .Ctx<xla::ffi::ThreadPool>()                                            \
                                    .RemainingArgs()                                                        \
                                    .RemainingRets()                                                        \
                                    .Attr<bool>("reverse")                                                  \
                                    .Attr<bool>("rounded"))

#define FNET_GRADIENT(name, Cell)                                                                           \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* frame);          \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                            \
      name, fnet::recurrent::call_gradient<fnet::recurrent::Cell>,                                                                \
      xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets().Attr<bool>("reverse"))

FNET_FORWARD(fnet_lstm, Lstm);
FNET_FORWARD(fnet_gru, Gru);
FNET_GRADIENT(fnet_lstm_gradient, Lstm);
FNET_GRADIENT(fnet_gru_gradient, Gru);
