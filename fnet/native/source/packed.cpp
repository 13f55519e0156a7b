// XLA's call of `packed_product`. Operands: x [R, K], codes, scale, and the table of 16 values.

#include "packed.h"

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error packed(ffi::ThreadPool threads, int64_t bits, int64_t wide, ffi::Buffer<ffi::F32> x,
                         ffi::AnyBuffer codes, ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::F32> table,
                         ffi::Result<ffi::Buffer<ffi::F32>> y) {
  const auto given = x.dimensions(), stored = codes.dimensions(), scales = scale.dimensions(), result = y->dimensions();
  if (given.size() != 2 || stored.size() != 2 || scales.size() != 2 || result.size() != 2 || table.element_count() != 16)
    return ffi::Error::InvalidArgument("fnet_packed: the operands must be matrices, and the table 16 numbers");
  if (bits != 4 && bits != 8) return ffi::Error::InvalidArgument("fnet_packed: a code must have 4 or 8 bits");
  const int64_t count = bits == 4 ? 2 : 1, inputs = stored[wide ? 0 : 1] * count, outputs = stored[wide ? 1 : 0];
  const int64_t groups = scales[wide ? 0 : 1];
  if (given[1] != inputs || result[0] != given[0] || result[1] != outputs || scales[wide ? 1 : 0] != outputs)
    return ffi::Error::InvalidArgument("fnet_packed: the shapes of the operands do not fit together");
  if (groups < 1 || inputs % (groups * count) != 0)
    return ffi::Error::InvalidArgument("fnet_packed: the groups must divide the inputs");
  const fnet::Packed product = {given[0],
                                inputs,
                                outputs,
                                groups,
                                x.typed_data(),
                                static_cast<const uint8_t*>(codes.untyped_data()),
                                scale.typed_data(),
                                table.typed_data(),
                                y->typed_data()};
  try {
    fnet::Borrowed<ffi::ThreadPool> pool(threads);
    fnet::packed_product(pool, product, bits, wide != 0);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(fnet_packed, packed,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("wide")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
#pragma GCC visibility pop
