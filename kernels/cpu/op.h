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
};
Interface torch_;
bool enabled = true;
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

bool read_matrix(Value value, Matrix& m) {
  View v(handle(value));
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

// One weight or bias list. Of a list with a tensor per expert only the experts in `routing` are looked at.
bool read_list(Value value, int dim, int dtype, const Routing* routing, Experts& to) {
  size_t count = 0;
  check(torch_.list_size(handle(value), &count));
  to.present = count > 0;
  if (!count) return true;
  View v(item(value, 0));
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
    View part(item(value, size_t(group.expert)));
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

bool few(const Call& c) {
  int64_t slots = c.ids.rows * c.ids.columns;
  if (max_slots >= 0) return slots <= max_slots;
  return slots <= MOST_SLOTS && slots <= c.w_in.count * (c.w_in.contiguous_in && c.w_out.contiguous_in ? ROWS_BY_DOTS : ROWS_BY_SUMS);
}

// Threads that pay: one for every so many weight elements that are read; later rows of an expert cost a part of the first.
int threads_for(const Call& c, const Routing& r) {
  uint32_t most = 1;
  if (omp_in_parallel()) return 1;
  check(torch_.threads(&most));
  int64_t expert = c.w_in.out * c.w_in.in * (c.w_up.present ? 2 : 1) + c.w_out.out * c.w_out.in;
  int64_t work = expert * int64_t(3 * r.groups.size() + r.order.size()) / 4;
  return int(std::max<int64_t>(1, std::min<int64_t>(most, work / 65536)));
}

// The result, or null when the general op has to run.
Handle experts(Value* stack) {
  Call c;
  int64_t body = bits<int64_t>(stack[9]);
  c.activation = int(body & 0xff);
  c.gating = int(body >> 8 & 0xff);
  c.up_first = body >> 16 & 1;
  c.weight_on_input = body >> 17 & 1;
  c.first = bits<double>(stack[10]);
  c.second = bits<double>(stack[11]);
  c.out_dtype = bits<int32_t>(stack[12]);
  if (!enabled || !read_matrix(stack[1], c.ids)) return nullptr;
  if (!read_matrix(stack[0], c.x) || !read_matrix(stack[2], c.weights)) return nullptr;
  if (!is_float(c.x.dtype) || !is_float(c.weights.dtype) || !is_float(c.out_dtype)) return nullptr;
  if (c.ids.dtype > I64 || c.ids.dtype < 0) return nullptr;
  Experts* const lists[] = {&c.w_in, &c.w_up, &c.w_out, &c.b_in, &c.b_up, &c.b_out};
  for (int i = 0; i < 6; ++i)
    if (!read_list(stack[3 + i], i < 3 ? 2 : 1, c.x.dtype, nullptr, *lists[i])) return nullptr;
  if (!fits(c) || !few(c)) return nullptr;
  Routing routing(c.ids, c.w_in.count);
  for (int i = 0; i < 6; ++i)
    if (lists[i]->present && !lists[i]->base && !read_list(stack[3 + i], i < 3 ? 2 : 1, c.x.dtype, &routing, *lists[i])) return nullptr;
  c.threads = threads_for(c, routing);
  const int64_t sizes[] = {c.x.rows, c.w_out.out}, strides[] = {std::max<int64_t>(c.w_out.out, 1), 1};
  Handle out;
  check(torch_.empty(2, sizes, strides, c.out_dtype, 0, 0, &out));
  std::unique_ptr<void, int32_t (*)(Handle)> owner(out, torch_.release);
  check(torch_.data(out, &c.out));
  switch (c.x.dtype) {
    case FLOAT: Body<float>(c, routing).run(); break;
    case BFLOAT16: Body<BF16>(c, routing).run(); break;
    case HALF: Body<F16>(c, routing).run(); break;
    default: Body<double>(c, routing).run();
  }
  return owner.release();
}

// Releasing a list does not release its tensors.
void release(const Value* stack) {
  for (int i = 0; i < 3; ++i) torch_.release(handle(stack[i]));
  for (int i = 3; i < 9; ++i) {
    size_t count = 0;
    torch_.list_size(handle(stack[i]), &count);
    for (size_t j = 0; j < count; ++j) torch_.release(item(stack[i], j));
    torch_.list_release(handle(stack[i]));
  }
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

// Off: every call goes to the general op. slots: the most that this kernel takes, -1 for the measured rule.
extern "C" __attribute__((visibility("default"))) void moefuse_configure(int32_t on, int64_t slots) {
  enabled = on;
  max_slots = slots;
}
