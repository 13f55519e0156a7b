// XLA's handler for convolutions: checks buffers and attributes, and calls the kernels.
#include "convolution.h"

#include <exception>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace fnet {
namespace convolution {
namespace {

using Attribute = ffi::Span<const int64_t>;

ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("fnet_convolution: " + what); }

std::string text(ffi::Span<const int64_t> sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); i++) text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

// Copies three values within `lowest` to LIMIT; returns whether they are.
bool copied(Attribute values, int64_t lowest, int64_t (&to)[3]) {
  if (values.size() != 3) return false;
  for (int axis = 0; axis < 3; axis++) {
    to[axis] = values[static_cast<size_t>(axis)];
    if (to[axis] < lowest || to[axis] > LIMIT) return false;
  }
  return true;
}

ffi::Error convolve(ffi::ThreadPool threads, int64_t kind, Attribute strides, Attribute low, Attribute x_dilation,
                    Attribute w_dilation, int64_t groups, int64_t flipped, int64_t transposed, ffi::AnyBuffer first,
                    ffi::AnyBuffer second, ffi::Result<ffi::AnyBuffer> result) {
  if (kind != 0 && kind != 1) return invalid("expected kind 0 or 1, got " + std::to_string(kind));
  const auto x = first.dimensions(), other = second.dimensions(), out = result->dimensions();
  if (x.size() != 5 || other.size() != 5 || out.size() != 5)
    return invalid("expected arrays of five axes, got " + text(x) + ", " + text(other) + " and " + text(out));
  Geometry g = {};
  if (!copied(strides, 1, g.strides)) return invalid("expected three strides of at least 1, got " + text(strides));
  if (!copied(low, -LIMIT, g.low)) return invalid("expected three paddings, got " + text(low));
  if (!copied(x_dilation, 1, g.x_dilation) || !copied(w_dilation, 1, g.w_dilation))
    return invalid("expected three dilations of at least 1, got " + text(x_dilation) + " and " + text(w_dilation));

  const auto w = kind == 0 ? other : out, y = kind == 0 ? out : other;
  g.batch = x[0], g.channels = x[4], g.features = y[4], g.groups = groups;
  for (int axis = 0; axis < 3; axis++) {
    const auto i = static_cast<size_t>(axis);
    g.in[axis] = x[i + 1], g.out[axis] = y[i + 1], g.window[axis] = w[i];
    if (g.x_dilation[axis] > 1 && (g.strides[axis] > 1 || kind == 1))
      return invalid("a dilated input has stride 1 and kind 0, got stride " + std::to_string(g.strides[axis]) +
                     " and kind " + std::to_string(kind));
  }
  g.flipped = flipped != 0, g.transposed = transposed != 0;
  if (kind == 1 && (g.flipped || g.transposed)) return invalid("a kernel's gradient is not flipped or transposed");
  if (groups < 1 || g.channels % groups != 0 || g.features % groups != 0)
    return invalid("expected channels and features that " + std::to_string(groups) + " groups divide, got " +
                   std::to_string(g.channels) + " and " + std::to_string(g.features));
  const int64_t rows = g.transposed ? g.group_features() : g.group_channels();
  const int64_t columns = g.transposed ? g.channels : g.features;
  if (w[3] != rows || w[4] != columns)
    return invalid("expected a kernel [depth, height, width, " + std::to_string(rows) + ", " +
                   std::to_string(columns) + "], got " + text(w));
  if (y[0] != g.batch) return invalid("expected as many examples in both arrays, got " + text(x) + " and " + text(y));

  Borrowed<ffi::ThreadPool> pool(threads);
  const auto type = first.element_type(), result_type = result->element_type();
  const auto run = [&](const auto* a, const auto* b, auto* c) {
    if (kind == 0) product(pool, g, a, b, c);
    else kernel_gradient(pool, g, a, b, c);
  };
  const auto data = [](auto* of, ffi::AnyBuffer& buffer) { return static_cast<decltype(of)>(buffer.untyped_data()); };
  float* const floats = nullptr;
  bfloat16* const halves = nullptr;
  try {
    if (type != second.element_type()) return invalid("expected operands of one type");
    if (type == ffi::DataType::F32 && result_type == ffi::DataType::F32)
      run(data(floats, first), data(floats, second), data(floats, *result));
    else if (type == ffi::DataType::BF16 && result_type == ffi::DataType::BF16)
      run(data(halves, first), data(halves, second), data(halves, *result));
    else if (type == ffi::DataType::BF16 && result_type == ffi::DataType::F32)
      run(data(halves, first), data(halves, second), data(floats, *result));
    else return invalid("expected float32, or bfloat16 with a result of bfloat16 or float32");
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "fnet_convolution: out of memory");
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("fnet_convolution: ") + error.what());
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace convolution
}  // namespace fnet

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* fnet_convolution(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(fnet_convolution, fnet::convolution::convolve,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("kind")
                                  .Attr<ffi::Span<const int64_t>>("strides")
                                  .Attr<ffi::Span<const int64_t>>("low")
                                  .Attr<ffi::Span<const int64_t>>("x_dilation")
                                  .Attr<ffi::Span<const int64_t>>("w_dilation")
                                  .Attr<int64_t>("groups")
                                  .Attr<int64_t>("flipped")
                                  .Attr<int64_t>("transposed")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
