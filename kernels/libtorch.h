// What all ops in C++ have of libtorch's stable C interface: its functions, what becomes of its failures, and who owns which handle. The
// functions arrive as a table; only the exceptions that libtorch's callers know by their type come from a header (0.3 s of the compilation).
#include <c10/util/Exception.h>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

using Handle = void*;
using Value = uint64_t;
using Kernel = void(Value*, uint64_t, uint64_t);
constexpr uint64_t TORCH_2_10 = (uint64_t(2) << 56) | (uint64_t(10) << 48);

// In the order of INTERFACE in moefuse/_torch_private/cpp.py.
struct Interface {
  const char* (*what)();  // text of this thread's last failure; empty where nobody kept it (moefuse/runtime/failures.py)
  int32_t (*dim)(Handle, int64_t*);
  int32_t (*sizes)(Handle, int64_t**);
  int32_t (*strides)(Handle, int64_t**);
  int32_t (*dtype)(Handle, int32_t*);
  int32_t (*data)(Handle, void**);
  int32_t (*empty)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*);
  int32_t (*release)(Handle);
  int32_t (*list_size)(Handle, size_t*);
  int32_t (*list_item)(Handle, size_t, Value*);
  int32_t (*list_release)(Handle);
  int32_t (*call)(const char*, const char*, Value*, uint64_t);
  int32_t (*library)(const char*, const char*, const char*, uint32_t, Handle*);
  int32_t (*implement)(Handle, const char*, Kernel*, uint64_t);
};
Interface torch_;

// A table of functions: first those of Interface, then the op's own.
template <class Own> void read_table(void* const* functions, Own& own) {
  std::memcpy(&torch_, functions, sizeof torch_);
  std::memcpy(&own, functions + sizeof torch_ / sizeof *functions, sizeof own);
}

template <class E> void throw_as(const std::string& text) { throw E({__func__, __FILE__, uint32_t(__LINE__)}, text); }

// Throws what failed in libtorch. Of an exception the C interface keeps the text alone; where a Python op raised it, that begins with the
// type's name (and ends with where it was), and those that libtorch has a class for arrive in Python as the same type.
[[noreturn]] void fail() {
  static constexpr std::pair<const char*, void (*)(const std::string&)> types[] = {
      {"OutOfMemoryError: ", throw_as<c10::OutOfMemoryError>}, {"ValueError: ", throw_as<c10::ValueError>},
      {"TypeError: ", throw_as<c10::TypeError>},               {"IndexError: ", throw_as<c10::IndexError>},
      {"RuntimeError: ", throw_as<c10::Error>},                {"NotImplementedError: ", throw_as<c10::NotImplementedError>},
  };
  const std::string text = torch_.what();
  for (auto [name, throw_it] : types)
    if (text.rfind(name, 0) == 0) throw_it(text.substr(std::strlen(name)));
  if (text.find("out of memory") != std::string::npos) throw_as<c10::OutOfMemoryError>(text);
  throw std::runtime_error(text.empty() ? "moefuse::experts: a call into libtorch failed" : text);
}

void check(int32_t error) {
  if (error) fail();
}

Handle handle(Value v) { return reinterpret_cast<Handle>(v); }

// Element of a list of tensors; it stays the list's.
Handle item(Value list, size_t index) {
  Value v;
  check(torch_.list_item(handle(list), index, &v));
  return handle(v);
}

// A new tensor, released unless `give` is called.
struct Fresh {
  Handle t = nullptr;
  void* data = nullptr;
  Fresh() = default;
  // By way of the other constructor, so that what throws after `empty` releases.
  Fresh(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type, int32_t device) : Fresh() {
    const int32_t error = torch_.empty(dim, sizes, strides, dtype, device_type, device, &t);
    // Nothing else is wrong with sizes that were computed here.
    if (error && !*torch_.what()) throw_as<c10::OutOfMemoryError>("moefuse::experts: out of memory");
    check(error);
    check(torch_.data(t, &data));
  }
  Fresh(Fresh&& other) noexcept : t(std::exchange(other.t, nullptr)), data(other.data) {}
  ~Fresh() { if (t) torch_.release(t); }
  Value give() { return reinterpret_cast<Value>(std::exchange(t, nullptr)); }
};

// Releases a list of tensors with its elements, which deleting the list leaves alive, and a list of numbers.
void release(const Value* lists) {
  size_t count = 0;
  torch_.list_size(handle(lists[0]), &count);
  for (size_t i = 0; i < count; ++i) torch_.release(item(lists[0], i));
  for (int i = 0; i < 2; ++i) torch_.list_release(handle(lists[i]));
}

// Runs an op whose first arguments are these two lists. What libtorch puts on the stack is the kernel's: nobody else releases it, nor when
// the kernel throws. `compute` takes none of it over, and returns false, with the stack as it was, where `general` has to compute. That takes
// the arguments over, also when it fails.
template <class F> void run_op(Value* stack, const char* general, F compute) {
  const Value lists[] = {stack[0], stack[1]};
  bool done = false;
  try {
    done = compute(stack);
  } catch (...) {
    release(lists);
    throw;
  }
  if (!done) return check(torch_.call(general, "", stack, TORCH_2_10));
  release(lists);
}

}  // namespace
