// Arguments of an op as libtorch's dispatcher hands them over, read through the stable C interface of libtorch.
namespace {

// In the order of NAMES in moefuse/runtime/native.py.
struct Functions {
  int32_t (*threads)(uint32_t*);
  int32_t (*blob)(void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t, int32_t, int32_t, Handle*);
  int32_t (*mm)(Handle, Handle, Handle);
  int32_t (*new_list)(size_t, Handle*);
  int32_t (*append)(Handle, Value);
};
Functions more_;
bool enabled = true;
int64_t max_slots = -1;
bool widens[2] = {};  // float16, bfloat16: whether GEMMs in float32 are quicker on this CPU

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
  if (!c.w_in.present || c.w_in.in != c.x.columns || c.w_in.out % gate) return false;
  if ((c.gating == SEPARATE) != c.w_up.present || (c.b_up.present && !c.w_up.present)) return false;
  if (c.w_up.present && (c.w_up.count != experts || c.w_up.out != c.w_in.out || c.w_up.in != c.w_in.in)) return false;
  if (!c.w_out.present || c.w_out.count != experts || c.w_out.in != c.w_in.out / gate) return false;
  return vector(c.b_in, c.w_in.out) && vector(c.b_up, c.w_in.out) && vector(c.b_out, c.w_out.out);
}

// Threads of torch, or one inside a parallel region.
int torch_threads() {
  uint32_t most = 1;
  if (omp_in_parallel()) return 1;
  check(more_.threads(&most));
  return int(most);
}

// Whether GEMMs of this dtype run in float32, or in double; other calls go to the general op.
bool multiplies(int dtype) { return dtype == HALF ? widens[0] : dtype == BFLOAT16 ? widens[1] : true; }

struct Borrowed {
  Handle t;
  Borrowed(const void* data, int dtype, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
    const int64_t sizes[] = {rows, columns}, strides[] = {row_stride, column_stride};
    check(more_.blob(const_cast<void*>(data), 2, sizes, strides, 0, dtype, 0, 0, &t));
  }
  ~Borrowed() { torch_.release(t); }
  Borrowed(const Borrowed&) = delete;
};

void multiply(int dtype, void* out, int64_t ld, int64_t m, int64_t k, int64_t n, Operand a, Operand b) {
  if (!m || !n) return;
  Borrowed left(a.data, dtype, m, k, a.row_stride, a.column_stride), right(b.data, dtype, k, n, b.row_stride, b.column_stride);
  Borrowed o(out, dtype, m, n, ld, 1);
  check(more_.mm(o.t, left.t, right.t));
}

// The six lists of weights and biases, from element `first` of `list` on; `lengths` says how many tensors each has.
struct Lists {
  Value list;
  size_t starts[7], counts[6];

  bool read(Value tensors, Value lengths, size_t first) {
    size_t size = 0, six = 0;
    list = tensors;
    check(torch_.list_size(handle(tensors), &size));
    check(torch_.list_size(handle(lengths), &six));
    if (size < first || six != 6) return false;
    starts[0] = first;
    for (int i = 0; i < 6; ++i) {
      Value n;
      check(torch_.list_item(handle(lengths), i, &n));
      counts[i] = size_t(n);
      if (counts[i] > size - starts[i]) return false;
      starts[i + 1] = starts[i] + counts[i];
    }
    return true;
  }

  // Shapes, strides and, of stacked tensors, addresses. With `routing` the addresses of the experts that it uses.
  bool describe(Call& c, const Routing* routing) const {
    for (int i = 0; i < 6; ++i) {
      Experts& to = *c.lists()[i];
      if (routing && (!to.present || to.base)) continue;
      if (!read_list(list, starts[i], counts[i], i < 3 ? 2 : 1, c.x.dtype, routing, to)) return false;
    }
    return true;
  }
};

void read_body(Call& c, Value packed, Value first, Value second) {
  int64_t body = bits<int64_t>(packed);
  c.activation = int(body & 0xff);
  c.gating = int(body >> 8 & 0xff);
  c.up_first = body >> 16 & 1;
  c.weight_on_input = body >> 17 & 1;
  c.first = bits<double>(first);
  c.second = bits<double>(second);
}

// Shape checks for the ids and routing weights, then those of the lists; a call that fails here gets its error from the general op.
bool read_forward(Call& c, const Value* stack, Lists& lists) {
  read_body(c, stack[2], stack[3], stack[4]);
  c.out_dtype = bits<int32_t>(stack[5]);
  if (!enabled || !lists.read(stack[0], stack[1], 3)) return false;
  if (!read_matrix(item(stack[0], 0), c.x) || !read_matrix(item(stack[0], 1), c.ids) || !read_matrix(item(stack[0], 2), c.weights)) return false;
  if (!is_float(c.x.dtype) || !is_float(c.weights.dtype) || !is_float(c.out_dtype)) return false;
  if (c.ids.dtype > I64 || c.ids.dtype < 0) return false;
  if (c.ids.rows != c.x.rows || c.weights.rows != c.x.rows || c.weights.columns != c.ids.columns) return false;
  return lists.describe(c, nullptr) && fits(c);
}

Fresh fresh(std::initializer_list<int64_t> sizes, int dtype) {
  std::vector<int64_t> n(sizes), strides(n.size(), 1);
  for (size_t d = n.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(n[d], 1);
  return Fresh(int64_t(n.size()), n.data(), strides.data(), dtype, 0, 0);
}

int32_t implement(void* const* functions, std::initializer_list<std::pair<const char*, Kernel*>> ops) {
  read_table(functions, more_);
  Handle library;
  if (int32_t error = torch_.library("moefuse", "CPU", "moefuse/kernels/cpu", 1, &library)) return error;
  for (auto [name, kernel] : ops)
    if (int32_t error = torch_.implement(library, name, kernel, TORCH_2_10)) return error;
  return 0;
}

}  // namespace

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
