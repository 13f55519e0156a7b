// Tasks on a pool of threads, and memory for them. Threads claim tasks by an atomic counter, so a thread
// that the system takes away for a while delays one task and not the others. Results must belong to
// tasks and never to threads: then they have the same bits in every run.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>

namespace fnet {

// What the kernels need of a pool. Work that is scheduled may start late, or after its caller is done.
class Pool {
 public:
  virtual ~Pool() = default;
  virtual int64_t threads() const = 0;
  virtual void schedule(void (*work)(void*), void* data) = 0;
};

// A pool with the methods num_threads() and Schedule(function), as xla::ffi::ThreadPool.
template <class Native>
class Borrowed final : public Pool {
 public:
  explicit Borrowed(Native& native) : native_(native) {}
  int64_t threads() const override { return std::max<int64_t>(1, native_.num_threads()); }
  void schedule(void (*work)(void*), void* data) override {
    native_.Schedule([work, data] { work(data); });
  }

 private:
  Native& native_;
};

namespace internal {

// The tasks of one call of `parallel`. Each helper owns a share, because it may start when the call has
// returned. `run` and `task` are used only by those who claimed a task, for whom the caller waits.
class Tasks {
 public:
  Tasks(int64_t count, void (*run)(void*, int64_t), void* task) : count_(count), run_(run), task_(task) {}

  void work() {
    for (int64_t index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
      // After an exception, the other tasks are claimed and left out.
      if (!failed_.load(std::memory_order_relaxed)) {
        try {
          run_(task_, index);
        } catch (...) {
          if (!failed_.exchange(true)) error_ = std::current_exception();
        }
      }
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_all();
      }
    }
  }

  void wait() {
    // The last tasks usually end within microseconds of each other, less than it takes to sleep.
    for (int spin = 0; spin < 2000; spin++) {
      if (done_.load(std::memory_order_acquire) == count_) break;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return done_.load(std::memory_order_acquire) == count_; });
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const int64_t count_;
  void (*const run_)(void*, int64_t);
  void* const task_;
  std::atomic<int64_t> next_{0}, done_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable finished_;
};

}  // namespace internal

// Calls task(0) to task(count - 1), each once, and returns when all are done. The caller works too, so
// nothing waits for a thread that the pool does not have. Rethrows the first exception of a task.
template <class Task>
void parallel(Pool& pool, int64_t count, Task&& task) {
  const int64_t threads = std::min(pool.threads(), count);
  if (threads <= 1) {
    for (int64_t index = 0; index < count; index++) task(index);
    return;
  }
  using Stored = std::remove_reference_t<Task>;
  auto run = [](void* stored, int64_t index) { (*static_cast<Stored*>(stored))(index); };
  auto tasks = std::make_shared<internal::Tasks>(count, run, &task);
  auto help = [](void* share) {
    std::unique_ptr<std::shared_ptr<internal::Tasks>> owned(static_cast<std::shared_ptr<internal::Tasks>*>(share));
    (*owned)->work();
  };
  for (int64_t helper = 1; helper < threads; helper++) pool.schedule(help, new std::shared_ptr<internal::Tasks>(tasks));
  tasks->work();
  tasks->wait();
}

// Uninitialized memory on the boundary of a cache line, freed with its owner.
template <class T>
class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t count) { grow(count); }
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { std::free(data_); }

  // Makes room for at least `count` elements. What the memory held is lost.
  void grow(int64_t count) {
    if (count <= size_) return;
    std::free(std::exchange(data_, nullptr));
    size_ = 0;
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
    if (data_ == nullptr) throw std::bad_alloc();
    size_ = count;
  }

  T* data() const { return data_; }
  T& operator[](int64_t index) const { return data_[index]; }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace fnet
