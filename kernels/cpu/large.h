// The whole op for many slots: rows gathered by expert in chunks that stay in cache, GEMMs by torch, everything between them here.
// A 16-bit call multiplies in float32: its weights are widened a tile at a time, the way of moefuse/runtime/gemm.py.
namespace {

// out[i * ld_out + j] = sum over k of rows[i * in + k] * w[k * k_stride + j * j_stride]
using Multiply = void (*)(int dtype, void* out, int64_t ld_out, const void* rows, int64_t count, int64_t in, const void* w, int64_t columns,
                          int64_t k_stride, int64_t j_stride);

template <class D> class Large {
  using A = Acc<D>;
  static constexpr bool WIDENED = !std::is_same<D, A>::value;
  static constexpr int64_t CHUNK_ROWS = 256, TILE = 1 << 17, ALONE = 1 << 14;

 public:
  Large(const Call& call, const Routing& routing, Multiply mm)
      : c(call), r(routing), multiply(mm), top_k(call.ids.columns), in(call.x.columns),
        width(call.gating == SEPARATE ? 2 * call.w_in.out : call.w_in.out), inner(call.w_out.in), hidden(call.w_out.out) {}

  void run() {
    int64_t slots = int64_t(r.order.size()), most = 0;
    for (size_t g = 0; g < r.groups.size(); g = last(g)) most = std::max(most, r.groups[last(g) - 1].end - r.groups[g].begin);
    xs.reset(new A[most * in]);
    h.reset(new A[most * width]);
    a.reset(new A[most * inner]);
    y.reset(new A[slots * hidden]);
    if (WIDENED) tile.reset(new A[std::max(TILE, 16 * std::max(in, inner))]);
    for (size_t g = 0; g < r.groups.size(); g = last(g)) chunk(g, last(g));
    parallel(c.x.rows, hidden * top_k, [&](int64_t t) { combine_row<D, true>(c, r, y.get(), t, 0, hidden); });
  }

 private:
  // One past the last group of the chunk that starts with group g; a larger group stands alone.
  size_t last(size_t g) const {
    int64_t begin = r.groups[g].begin;
    size_t end = g + 1;
    while (end < r.groups.size() && r.groups[end].end - begin <= CHUNK_ROWS) ++end;
    return end;
  }

  template <class F> void parallel(int64_t n, int64_t cost, F f) const {
    if (c.threads <= 1 || n * cost < ALONE) {
      for (int64_t i = 0; i < n; ++i) f(i);
      return;
    }
#pragma omp parallel for num_threads(c.threads)
    for (int64_t i = 0; i < n; ++i) f(i);
  }

  void chunk(size_t first, size_t end) {
    int64_t begin = r.groups[first].begin, count = r.groups[end - 1].end - begin;
    parallel(count, in, [&](int64_t i) { gather(r.order[begin + i], xs.get() + i * in); });
    for (size_t g = first; g < end; ++g) {
      const auto& group = r.groups[g];
      int64_t row = group.begin - begin, rows = group.end - group.begin;
      project_rows(c.w_in, group.expert, xs.get() + row * in, rows, in, h.get() + row * width, width);
      if (c.gating == SEPARATE) project_rows(c.w_up, group.expert, xs.get() + row * in, rows, in, h.get() + row * width + c.w_in.out, width);
    }
    parallel(count, width * 4, [&](int64_t i) {
      A* row = h.get() + i * width;
      int64_t slot = r.order[begin + i], expert = Routing::id(c.ids, slot / top_k, slot % top_k);
      finish(row, c.w_in.out, c.b_in, expert);
      if (c.gating == SEPARATE) finish(row + c.w_in.out, c.w_in.out, c.b_up, expert);
      activate_row<D>(c, row, inner, a.get() + i * inner);
    });
    for (size_t g = first; g < end; ++g) {
      const auto& group = r.groups[g];
      project_rows(c.w_out, group.expert, a.get() + (group.begin - begin) * inner, group.end - group.begin, inner,
                   y.get() + group.begin * hidden, hidden);
    }
  }

  // The token of a slot in the accumulation dtype.
  void gather(int64_t slot, A* to) const {
    const D* from = reinterpret_cast<const D*>(c.x.data) + (slot / top_k) * c.x.row_stride;
    constexpr int W = WIDTH<A>;
    int64_t i = 0;
    if (c.x.column_stride == 1)
      for (; i + W <= in; i += W) store<A>(to + i, load(from + i));
    for (; i < in; ++i) to[i] = widen(from[i * c.x.column_stride]);
    if (!c.weight_on_input) return;
    A scale = scalar<A>(c.weights, slot / top_k, slot % top_k);
    for (i = 0; i < in; ++i) to[i] = rounded<D>(to[i] * scale);
  }

  // Adds the bias and rounds to D.
  void finish(A* row, int64_t n, const Experts& b, int64_t expert) const {
    if (!WIDENED && !b.present) return;
    const D* bias = b.present ? static_cast<const D*>(b.of(expert, sizeof(D))) : nullptr;
    constexpr int W = WIDTH<A>;
    int64_t i = 0;
    for (; i + W <= n; i += W) {
      Vec<A> v = load(row + i);
      if (bias) v += load(bias + i);
      store<A>(row + i, rounded_lanes(v, static_cast<D*>(nullptr)));
    }
    for (; i < n; ++i) row[i] = rounded<D>(bias ? row[i] + widen(bias[i]) : row[i]);
  }

  void project_rows(const Experts& w, int64_t expert, const A* rows, int64_t count, int64_t n, A* out, int64_t ld) const {
    constexpr int dtype = std::is_same<A, double>::value ? DOUBLE : FLOAT;
    const D* data = static_cast<const D*>(w.of(expert, sizeof(D)));
    if (!WIDENED) return multiply(dtype, out, ld, rows, count, n, data, w.out, w.contiguous_in ? 1 : w.ld, w.contiguous_in ? w.ld : 1);
    int64_t step = std::max<int64_t>(16, TILE / std::max<int64_t>(n, 1));
    for (int64_t j = 0; j < w.out; j += step) {
      int64_t columns = std::min(step, w.out - j);
      if (w.contiguous_in) {
        parallel(columns, n, [&](int64_t i) { widen_row(data + (j + i) * w.ld, n, tile.get() + i * n); });
        multiply(dtype, out + j, ld, rows, count, n, tile.get(), columns, 1, n);
      } else {
        parallel(n, columns, [&](int64_t i) { widen_row(data + i * w.ld + j, columns, tile.get() + i * columns); });
        multiply(dtype, out + j, ld, rows, count, n, tile.get(), columns, columns, 1);
      }
    }
  }

  static void widen_row(const D* from, int64_t n, A* to) {
    constexpr int W = WIDTH<A>;
    int64_t i = 0;
    for (; i + W <= n; i += W) store<A>(to + i, load(from + i));
    for (; i < n; ++i) to[i] = widen(from[i]);
  }

  const Call& c;
  const Routing& r;
  const Multiply multiply;
  const int64_t top_k, in, width, inner, hidden;
  std::unique_ptr<A[]> xs, h, a, y, tile;
};

}  // namespace
