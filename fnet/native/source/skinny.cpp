// XLA's call of `skinny_product`. Operands: x [R, K] and w, [K, N] if wide, otherwise [N, K].

#include "skinny.h"

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

template <class Weight>
static ffi::Error product(ffi::ThreadPool& threads, bool wide, ffi::Buffer<ffi::F32>& x, ffi::AnyBuffer& w,
                          ffi::Result<ffi::Buffer<ffi::F32>>& y) {
  const auto given = x.dimensions(), result = y->dimensions();
  const fnet::Skinny<Weight> sizes = {given[0],       given[1], result[1], x.typed_data(),
                                      static_cast<const Weight*>(w.untyped_data()), y->typed_data()};
  try {
    fnet::Borrowed<ffi::ThreadPool> pool(threads);
    fnet::skinny_product(pool, sizes, wide);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

static ffi::Error skinny(ffi::ThreadPool threads, int64_t wide, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                         ffi::Result<ffi::Buffer<ffi::F32>> y) {
  const auto given = x.dimensions(), stored = w.dimensions(), result = y->dimensions();
  if (given.size() != 2 || stored.size() != 2 || result.size() != 2)
    return ffi::Error::InvalidArgument("fnet_skinny: the operands must be matrices");
  if (stored[wide ? 0 : 1] != given[1] || result[0] != given[0] || stored[wide ? 1 : 0] != result[1])
    return ffi::Error::InvalidArgument("fnet_skinny: the shapes of the operands do not fit together");
  if (w.element_type() == ffi::F32) return product<float>(threads, wide != 0, x, w, y);
  if (w.element_type() == ffi::BF16) return product<fnet::bfloat16>(threads, wide != 0, x, w, y);
  return ffi::Error::InvalidArgument("fnet_skinny: the matrix must be float32 or bfloat16");
}

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(fnet_skinny, skinny,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("wide")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
#pragma GCC visibility pop
