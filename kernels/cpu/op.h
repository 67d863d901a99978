// The kernel of moefuse::experts_infer as libtorch's dispatcher calls it: arguments through the stable C interface of libtorch, whose
// functions arrive as a table, so that nothing has to be linked. Calls that this kernel is not made for go on to moefuse::experts_general.
namespace {

using Handle = void*;
using Value = uint64_t;

// In the order of NAMES in moefuse/runtime/native.py.
struct Interface {
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
  int32_t (*implement)(Handle, const char*, void (*)(Value*, uint64_t, uint64_t), uint64_t);
  int32_t (*threads)(uint32_t*);
  int32_t (*blob)(void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t, int32_t, int32_t, Handle*);
  int32_t (*mm)(Handle, Handle, Handle);
};
Interface torch_;
bool enabled = true;
bool widens[2] = {};  // float16, bfloat16: whether GEMMs in float32 are quicker on this CPU
constexpr uint64_t TORCH_2_10 = (uint64_t(2) << 56) | (uint64_t(10) << 48);

void check(int32_t error) {
  if (error) throw std::runtime_error("moefuse::experts: a call into libtorch failed");
}

Handle handle(Value v) { return reinterpret_cast<Handle>(v); }

// Element of a list of tensors; it stays the list's.
Handle item(Value list, size_t index) {
  Value v;
  check(torch_.list_item(handle(list), index, &v));
  return handle(v);
}

struct View {
  int64_t dim, *sizes, *strides;
  int32_t dtype;
  void* data;
  explicit View(Handle t) {
    check(torch_.dim(t, &dim));
    check(torch_.sizes(t, &sizes));
    check(torch_.strides(t, &strides));
    check(torch_.dtype(t, &dtype));
    check(torch_.data(t, &data));
  }
};

bool is_float(int dtype) { return dtype == FLOAT || dtype == BFLOAT16 || dtype == DOUBLE || (HAS_F16 && dtype == HALF); }

bool read_matrix(Handle tensor, Matrix& m) {
  View v(tensor);
  if (v.dim != 2) return false;
  m = {static_cast<const char*>(v.data), v.dtype, v.sizes[0], v.sizes[1], v.strides[0], v.strides[1]};
  return true;
}

// Shape and storage order of one expert's weight (dim 2) or bias (dim 1); `sizes` and `strides` are past the expert dimension.
bool read_part(Experts& to, int dim, const int64_t* sizes, const int64_t* strides) {
  to.out = sizes[0];
  if (dim == 1) return strides[0] == 1 || sizes[0] == 1;
  to.in = sizes[1];
  to.contiguous_in = strides[1] == 1 || sizes[1] == 1;
  to.ld = to.contiguous_in ? strides[0] : strides[1];
  return to.contiguous_in || strides[0] == 1 || sizes[0] == 1;
}

// One weight or bias list: `count` elements of `list` from `first` on. Of a list with a tensor per expert only the experts in `routing`
// are looked at.
bool read_list(Value list, size_t first, size_t count, int dim, int dtype, const Routing* routing, Experts& to) {
  to.present = count > 0;
  if (!count) return true;
  View v(item(list, first));
  if (v.dtype != dtype) return false;
  if (count == 1 && v.dim == dim + 1) {
    to.count = v.sizes[0];
    to.stride = v.strides[0];
    to.base = static_cast<const char*>(v.data);
    return read_part(to, dim, v.sizes + 1, v.strides + 1);
  }
  to.count = int64_t(count);
  if (v.dim != dim || !read_part(to, dim, v.sizes, v.strides)) return false;
  if (!routing) return true;
  to.table.assign(count, nullptr);
  for (const auto& group : routing->groups) {
    if (group.expert >= to.count) return false;
    View part(item(list, first + size_t(group.expert)));
    Experts like;
    if (part.dtype != dtype || part.dim != dim || !read_part(like, dim, part.sizes, part.strides)) return false;
    if (like.out != to.out || like.in != to.in || like.ld != to.ld || like.contiguous_in != to.contiguous_in) return false;
    to.table[group.expert] = part.data;
  }
  return true;
}

template <class T> T bits(Value v) {
  T out;
  std::memcpy(&out, &v, sizeof(T));
  return out;
}

// Whether the sizes fit together; a call that fails here gets its error message from the general op.
bool fits(const Call& c) {
  int64_t gate = c.gating == MERGED || c.gating == INTERLEAVED ? 2 : 1, experts = c.w_in.count;
  auto vector = [&](const Experts& b, int64_t size) { return !b.present || (b.count == experts && b.out == size); };
  if (c.ids.rows != c.x.rows || c.weights.rows != c.x.rows || c.weights.columns != c.ids.columns) return false;
  if (!c.w_in.present || c.w_in.in != c.x.columns || c.w_in.out % gate) return false;
  if ((c.gating == SEPARATE) != c.w_up.present || (c.b_up.present && !c.w_up.present)) return false;
  if (c.w_up.present && (c.w_up.count != experts || c.w_up.out != c.w_in.out || c.w_up.in != c.w_in.in)) return false;
  if (!c.w_out.present || c.w_out.count != experts || c.w_out.in != c.w_in.out / gate) return false;
  return vector(c.b_in, c.w_in.out) && vector(c.b_up, c.w_in.out) && vector(c.b_out, c.w_out.out);
}

// Up to so many slots per expert this kernel is quicker than GEMMs of the BLAS library (measured, see benchmarks/ops_cpu.py).
// The choice depends on sizes alone, never on where the router sends the tokens.
constexpr int64_t ROWS_BY_DOTS = 16, ROWS_BY_SUMS = 4, MOST_SLOTS = 1024;
int64_t max_slots = -1;

// The expert outputs of a call take at most this; a larger call goes in blocks of tokens, but not of so few that experts get
// less than that many rows on average.
constexpr int64_t BLOCK_BYTES = int64_t(64) << 20, BLOCK_ROWS = 128;

bool few(const Call& c) {
  int64_t slots = c.ids.rows * c.ids.columns;
  if (max_slots >= 0) return slots <= max_slots;
  return slots <= MOST_SLOTS && slots <= c.w_in.count * (c.w_in.contiguous_in && c.w_out.contiguous_in ? ROWS_BY_DOTS : ROWS_BY_SUMS);
}

// Threads that pay: one for every so many weight elements that are read; later rows of an expert cost a part of the first.
int threads_for(const Call& c, const Routing& r, bool many) {
  uint32_t most = 1;
  if (omp_in_parallel()) return 1;
  check(torch_.threads(&most));
  if (many) return int(most);
  int64_t expert = c.w_in.out * c.w_in.in * (c.w_up.present ? 2 : 1) + c.w_out.out * c.w_out.in;
  int64_t work = expert * int64_t(3 * r.groups.size() + r.order.size()) / 4;
  return int(std::max<int64_t>(1, std::min<int64_t>(most, work / 65536)));
}

struct Borrowed {
  Handle t;
  Borrowed(void* data, int dtype, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
    const int64_t sizes[] = {rows, columns}, strides[] = {row_stride, column_stride};
    check(torch_.blob(data, 2, sizes, strides, 0, dtype, 0, 0, &t));
  }
  ~Borrowed() { torch_.release(t); }
  Borrowed(const Borrowed&) = delete;
};

void multiply(int dtype, void* out, int64_t ld_out, const void* rows, int64_t count, int64_t in, const void* w, int64_t columns,
              int64_t k_stride, int64_t j_stride) {
  if (!columns) return;
  Borrowed a(const_cast<void*>(rows), dtype, count, in, in, 1), b(const_cast<void*>(w), dtype, in, columns, k_stride, j_stride);
  Borrowed o(out, dtype, count, columns, ld_out, 1);
  check(torch_.mm(o.t, a.t, b.t));
}

bool takes_many(const Call& c) {
  if (max_slots >= 0) return false;
  return c.x.dtype == HALF ? widens[0] : c.x.dtype == BFLOAT16 ? widens[1] : true;
}

template <class D> void run_few(const Call& c, const Routing& routing) { Body<D>(c, routing).run(); }

template <class D> void run_many(const Call& call, const Routing& routing) {
  int64_t per_token = std::max<int64_t>(1, call.ids.columns * call.w_out.out * int64_t(sizeof(Acc<D>)));
  int64_t block = std::max<int64_t>({BLOCK_BYTES / per_token, BLOCK_ROWS * call.w_in.count / std::max<int64_t>(call.ids.columns, 1), 1});
  if (call.x.rows <= block) return Large<D>(call, routing, multiply).run();
  for (int64_t t = 0; t < call.x.rows; t += block) {
    Call part = call;
    part.x.rows = part.ids.rows = part.weights.rows = std::min(block, call.x.rows - t);
    part.x.data += t * call.x.row_stride * int64_t(sizeof(D));
    part.ids.data += t * call.ids.row_stride * item_size(call.ids.dtype);
    part.weights.data += t * call.weights.row_stride * item_size(call.weights.dtype);
    part.out = static_cast<char*>(call.out) + t * call.w_out.out * item_size(call.out_dtype);
    Large<D>(part, Routing(part.ids, call.w_in.count), multiply).run();
  }
}

template <class D> void run(const Call& c, const Routing& routing, bool many) {
  many ? run_many<D>(c, routing) : run_few<D>(c, routing);
}

// The result, or null when the general op has to run.
Handle experts(Value* stack) {
  Call c;
  int64_t body = bits<int64_t>(stack[2]);
  c.activation = int(body & 0xff);
  c.gating = int(body >> 8 & 0xff);
  c.up_first = body >> 16 & 1;
  c.weight_on_input = body >> 17 & 1;
  c.first = bits<double>(stack[3]);
  c.second = bits<double>(stack[4]);
  c.out_dtype = bits<int32_t>(stack[5]);
  size_t size = 0, lengths = 0, starts[7] = {3}, counts[6];
  check(torch_.list_size(handle(stack[0]), &size));
  check(torch_.list_size(handle(stack[1]), &lengths));
  if (!enabled || size < 3 || lengths != 6) return nullptr;
  for (int i = 0; i < 6; ++i) {
    Value n;
    check(torch_.list_item(handle(stack[1]), i, &n));
    counts[i] = size_t(n);
    if (counts[i] > size - starts[i]) return nullptr;
    starts[i + 1] = starts[i] + counts[i];
  }
  if (!read_matrix(item(stack[0], 0), c.x) || !read_matrix(item(stack[0], 1), c.ids) || !read_matrix(item(stack[0], 2), c.weights)) return nullptr;
  if (!is_float(c.x.dtype) || !is_float(c.weights.dtype) || !is_float(c.out_dtype)) return nullptr;
  if (c.ids.dtype > I64 || c.ids.dtype < 0) return nullptr;
  Experts* const lists[] = {&c.w_in, &c.w_up, &c.w_out, &c.b_in, &c.b_up, &c.b_out};
  for (int i = 0; i < 6; ++i)
    if (!read_list(stack[0], starts[i], counts[i], i < 3 ? 2 : 1, c.x.dtype, nullptr, *lists[i])) return nullptr;
  if (!fits(c)) return nullptr;
  const bool many = !few(c);
  if (many && !takes_many(c)) return nullptr;
  Routing routing(c.ids, c.w_in.count);
  for (int i = 0; i < 6; ++i)
    if (lists[i]->present && !lists[i]->base &&
        !read_list(stack[0], starts[i], counts[i], i < 3 ? 2 : 1, c.x.dtype, &routing, *lists[i]))
      return nullptr;
  c.threads = threads_for(c, routing, many);
  const int64_t sizes[] = {c.x.rows, c.w_out.out}, strides[] = {std::max<int64_t>(c.w_out.out, 1), 1};
  Handle out;
  check(torch_.empty(2, sizes, strides, c.out_dtype, 0, 0, &out));
  std::unique_ptr<void, int32_t (*)(Handle)> owner(out, torch_.release);
  check(torch_.data(out, &c.out));
  switch (c.x.dtype) {
    case FLOAT: run<float>(c, routing, many); break;
    case BFLOAT16: run<BF16>(c, routing, many); break;
    case HALF: run<F16>(c, routing, many); break;
    default: run<double>(c, routing, many);
  }
  return owner.release();
}

// Releasing a list does not release its tensors.
void release(const Value* stack) {
  size_t count = 0;
  torch_.list_size(handle(stack[0]), &count);
  for (size_t j = 0; j < count; ++j) torch_.release(item(stack[0], j));
  for (int i = 0; i < 2; ++i) torch_.list_release(handle(stack[i]));
}

// The arguments belong to this function; the general op takes them over.
void kernel(Value* stack, uint64_t, uint64_t) {
  Handle out = nullptr;
  try {
    out = experts(stack);
  } catch (...) {
    release(stack);
    throw;
  }
  if (!out) return check(torch_.call("moefuse::experts_general", "", stack, TORCH_2_10));
  release(stack);
  stack[0] = reinterpret_cast<Value>(out);
}

}  // namespace

// From now on the dispatcher runs moefuse::experts_infer on CPU tensors here. 0, or libtorch's error code.
extern "C" __attribute__((visibility("default"))) int32_t moefuse_register(void* const* functions) {
  std::memcpy(&torch_, functions, sizeof torch_);
  Handle library;
  if (int32_t error = torch_.library("moefuse", "CPU", "moefuse/kernels/cpu/op.h", 1, &library)) return error;
  return torch_.implement(library, "experts_infer", kernel, TORCH_2_10);
}

// Off: every call goes to the general op. slots: up to so many are "few", more go to the general op; -1 for the measured rule.
extern "C" __attribute__((visibility("default"))) void moefuse_configure(int32_t on, int64_t slots) {
  enabled = on;
  max_slots = slots;
}

// Whether float16 and bfloat16 calls of many slots are multiplied in float32 here; otherwise they go to the general op.
extern "C" __attribute__((visibility("default"))) void moefuse_widen(int32_t half, int32_t bfloat) {
  widens[0] = half;
  widens[1] = bfloat;
}
