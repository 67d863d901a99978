// moefuse::experts_forward and moefuse::experts_backward as libtorch's dispatcher calls them: float32, and 16-bit dtypes where the CPU has no
// GEMM instructions for them. Other calls go on to their general ops.
namespace {

bool trains(int dtype) { return max_slots < 0 && dtype != DOUBLE && multiplies(dtype); }

template <class D> void forward(const Call& c, const Routing& routing, void* h) { Large<D>(c, routing, multiply, static_cast<D*>(h)).run(); }

bool forward_op(Value* stack) {
  Call c;
  Lists lists;
  if (!read_forward(c, stack, lists) || !trains(c.x.dtype)) return false;
  Routing routing(c.ids, c.w_in.count);
  if (!lists.describe(c, &routing)) return false;
  c.threads = torch_threads();
  int64_t slots = c.ids.rows * c.ids.columns, width = c.gating == SEPARATE ? 2 * c.w_in.out : c.w_in.out, valid = int64_t(routing.order.size());
  Fresh out = fresh({c.x.rows, c.w_out.out}, c.out_dtype), h = fresh({slots, width}, c.x.dtype);
  Fresh order = fresh({slots}, I64), offsets = fresh({c.w_in.count + 1}, I64);
  c.out = out.data;
  std::memset(static_cast<char*>(h.data) + valid * width * item_size(c.x.dtype), 0, size_t((slots - valid) * width * item_size(c.x.dtype)));
  auto *sorted = static_cast<int64_t*>(order.data), *ends = static_cast<int64_t*>(offsets.data);
  std::copy(routing.order.begin(), routing.order.end(), sorted);
  for (int64_t s = 0, next = valid; s < slots; ++s)
    if (routing.position[s] < 0) sorted[next++] = s;
  std::fill(ends, ends + c.w_in.count + 1, 0);
  for (const auto& group : routing.groups) ends[group.expert + 1] = group.end - group.begin;
  for (int64_t e = 0; e < c.w_in.count; ++e) ends[e + 1] += ends[e];
  switch (c.x.dtype) {
    case FLOAT: forward<float>(c, routing, h.data); break;
    case BFLOAT16: forward<BF16>(c, routing, h.data); break;
    default: forward<F16>(c, routing, h.data);
  }
  Fresh* const results[] = {&out, &h, &order, &offsets};
  for (int i = 0; i < 4; ++i) stack[i] = results[i]->give();
  return true;
}

// Whether the tensor is one block of memory in the order of its own strides, as torch.empty_like then makes it.
bool dense(const View& v, int dim) {
  if (v.dim < dim) return false;
  const int64_t *n = v.sizes + v.dim - dim, *s = v.strides + v.dim - dim;
  int64_t each = dim == 1 ? n[0] : n[0] * n[1];
  bool part = dim == 1 ? s[0] == 1 : (s[1] == 1 && s[0] == n[1]) || (s[0] == 1 && s[1] == n[0]);
  return part && (v.dim == dim || v.strides[0] == each);
}

// Gradients of one list, shaped and stored like it; the parts of experts without rows are zeros. False: the list is not dense.
bool make_grads(const Lists& lists, int index, const Experts& like, const Routing& routing, int64_t item_bytes, Experts& to, std::vector<Fresh>& owned) {
  const int dim = index < 3 ? 2 : 1;
  const size_t part = size_t(like.out * (dim == 2 ? like.in : 1) * item_bytes);
  std::vector<char*> at;
  for (size_t i = 0; i < lists.counts[index]; ++i) {
    View v(item(lists.list, lists.starts[index] + i));
    if (!dense(v, dim)) return false;
    owned.emplace_back(v.dim, v.sizes, v.strides, v.dtype, 0, 0);
    for (int64_t e = 0; e < (v.dim > dim ? v.sizes[0] : 1); ++e) at.push_back(static_cast<char*>(owned.back().data) + size_t(e) * part);
  }
  to = like;
  to.base = nullptr;
  to.table.assign(at.begin(), at.end());
  std::vector<bool> used(at.size());
  for (const auto& group : routing.groups) used[group.expert] = true;
  for (size_t e = 0; e < at.size(); ++e)
    if (!used[e]) std::memset(at[e], 0, part);
  return true;
}

template <class D> void backward(const Call& c, const Matrix& grad, const void* h, const Routing& routing, const Needs& needs,
                                 std::array<Experts, 6>& targets, void* d_x, Fresh* d_weights) {
  Backward<D> work(c, grad, static_cast<const D*>(h), routing, needs, targets, multiply);
  work.run();
  if (d_x) work.sum_rows(static_cast<D*>(d_x));
  if (!d_weights) return;
  for (int64_t slot = 0; slot < c.weights.rows * c.weights.columns; ++slot) {
    float v = work.scale_grad(slot);
    switch (c.weights.dtype) {
      case HALF: static_cast<F16*>(d_weights->data)[slot] = narrow<F16>(v); break;
      case BFLOAT16: static_cast<BF16*>(d_weights->data)[slot] = narrow<BF16>(v); break;
      case FLOAT: static_cast<float*>(d_weights->data)[slot] = v; break;
      default: static_cast<double*>(d_weights->data)[slot] = v;
    }
  }
}

// Tensors: grad, x, weights, h, order, offsets, then the lists.
bool backward_op(Value* stack) {
  Call c;
  Lists lists;
  Matrix grad, h;
  const Needs needs(bits<int64_t>(stack[2]));
  read_body(c, stack[3], stack[4], stack[5]);
  if (!enabled || !lists.read(stack[0], stack[1], 6)) return false;
  Matrix* const inputs[] = {&grad, &c.x, &c.weights, &h};
  for (int i = 0; i < 4; ++i)
    if (!read_matrix(item(stack[0], i), *inputs[i]) || !is_float(inputs[i]->dtype)) return false;
  if (!trains(c.x.dtype) || h.dtype != c.x.dtype || h.column_stride != 1 || (h.rows > 1 && h.row_stride != h.columns)) return false;
  View order(item(stack[0], 4)), offsets(item(stack[0], 5));
  if (!lists.describe(c, nullptr) || !fits(c) || grad.columns != c.w_out.out || grad.rows != c.x.rows) return false;
  if (offsets.sizes[0] != c.w_in.count + 1 || order.sizes[0] != c.weights.rows * c.weights.columns) return false;
  if ((order.sizes[0] > 1 && order.strides[0] != 1) || offsets.strides[0] != 1) return false;
  Routing routing(static_cast<const int64_t*>(order.data), static_cast<const int64_t*>(offsets.data), order.sizes[0], c.w_in.count);
  if (!lists.describe(c, &routing)) return false;
  c.threads = torch_threads();
  std::array<Experts, 6> targets;
  std::vector<Fresh> grads;
  if (needs.x) grads.push_back(fresh({c.x.rows, c.x.columns}, c.x.dtype));
  if (needs.weights) grads.push_back(fresh({c.weights.rows, c.weights.columns}, c.weights.dtype));
  void* d_x = needs.x ? grads[0].data : nullptr;
  const bool wanted[] = {needs.w_in, needs.w_up, needs.w_out, needs.b_in, needs.b_up, needs.b_out};
  for (int i = 0; i < 6; ++i)
    if (wanted[i] && !make_grads(lists, i, *c.lists()[i], routing, item_size(c.x.dtype), targets[i], grads)) return false;
  Fresh* d_weights = needs.weights ? &grads[needs.x] : nullptr;
  switch (c.x.dtype) {
    case FLOAT: backward<float>(c, grad, h.data, routing, needs, targets, d_x, d_weights); break;
    case BFLOAT16: backward<BF16>(c, grad, h.data, routing, needs, targets, d_x, d_weights); break;
    default: backward<F16>(c, grad, h.data, routing, needs, targets, d_x, d_weights);
  }
  Handle results;
  check(more_.new_list(grads.size(), &results));
  for (Fresh& g : grads) check(more_.append(results, g.give()));
  stack[0] = reinterpret_cast<Value>(results);
  return true;
}

void forward_kernel(Value* stack, uint64_t, uint64_t) { run_op(stack, "moefuse::experts_forward_general", forward_op); }
void backward_kernel(Value* stack, uint64_t, uint64_t) { run_op(stack, "moefuse::experts_backward_general", backward_op); }

}  // namespace

// From now on the dispatcher runs both ops on CPU tensors here. 0, or libtorch's error code.
extern "C" __attribute__((visibility("default"))) int32_t moefuse_register(void* const* functions) {
  return implement(functions, {{"experts_forward", forward_kernel}, {"experts_backward", backward_kernel}});
}
