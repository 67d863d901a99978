// The whole op for few slots: route, project, activate, project, weighted sum. Values are those of moefuse/ops/meaning/reference.py.
namespace {

// c10::ScalarType
enum Dtype { U8 = 0, I8 = 1, I16 = 2, I32 = 3, I64 = 4, HALF = 5, FLOAT = 6, DOUBLE = 7, BFLOAT16 = 15 };
enum Gating { MERGED, INTERLEAVED, SEPARATE, PLAIN };

// A [rows, columns] tensor of any strides.
struct Matrix {
  const char* data;
  int dtype;
  int64_t rows, columns, row_stride, column_stride;
};

// One weight or bias list: where each expert's part is. `base` null: `table` [E] holds the experts that this call uses.
struct Experts {
  bool present = false, contiguous_in = true;
  int64_t count = 0, out = 0, in = 0, ld = 0, stride = 0;
  const char* base = nullptr;
  std::vector<const void*> table;
  const void* of(int64_t e, int64_t item) const { return base ? base + e * stride * item : table[e]; }
};

// The experts that have slots, ascending, and their slots in order. position[slot] is the sorted row, -1 for an id out of range.
struct Routing {
  struct Group { int64_t expert, begin, end; };
  std::vector<Group> groups;
  std::vector<int32_t> order, position;

  Routing(const Matrix& ids, int64_t experts) : position(ids.rows * ids.columns, -1) {
    int64_t slots = ids.rows * ids.columns;
    std::vector<int64_t> of(slots), start(experts + 1, 0);
    for (int64_t s = 0; s < slots; ++s) {
      of[s] = id(ids, s / ids.columns, s % ids.columns);
      if (uint64_t(of[s]) < uint64_t(experts)) ++start[of[s] + 1];
    }
    for (int64_t e = 0; e < experts; ++e) {
      if (start[e + 1]) groups.push_back({e, start[e], start[e] + start[e + 1]});
      start[e + 1] += start[e];
    }
    order.resize(start[experts]);
    for (int64_t s = 0; s < slots; ++s)
      if (uint64_t(of[s]) < uint64_t(experts)) {
        position[s] = int32_t(start[of[s]]++);
        order[position[s]] = int32_t(s);
      }
  }

  // From what a forward kept: order [slots], valid entries first, and offsets [experts + 1].
  Routing(const int64_t* sorted, const int64_t* offsets, int64_t slots, int64_t experts)
      : order(sorted, sorted + offsets[experts]), position(slots, -1) {
    for (int64_t e = 0; e < experts; ++e)
      if (offsets[e + 1] > offsets[e]) groups.push_back({e, offsets[e], offsets[e + 1]});
    for (size_t row = 0; row < order.size(); ++row) position[order[row]] = int32_t(row);
  }

  static int64_t id(const Matrix& m, int64_t row, int64_t column) {
    int64_t at = row * m.row_stride + column * m.column_stride;
    switch (m.dtype) {
      case U8: return reinterpret_cast<const uint8_t*>(m.data)[at];
      case I8: return reinterpret_cast<const int8_t*>(m.data)[at];
      case I16: return reinterpret_cast<const int16_t*>(m.data)[at];
      case I32: return reinterpret_cast<const int32_t*>(m.data)[at];
      default: return reinterpret_cast<const int64_t*>(m.data)[at];
    }
  }
};

template <class A> A scalar(const Matrix& m, int64_t row, int64_t column) {
  int64_t at = row * m.row_stride + column * m.column_stride;
  switch (m.dtype) {
    case HALF: return A(widen(reinterpret_cast<const F16*>(m.data)[at]));
    case BFLOAT16: return A(widen(reinterpret_cast<const BF16*>(m.data)[at]));
    case FLOAT: return A(reinterpret_cast<const float*>(m.data)[at]);
    default: return A(reinterpret_cast<const double*>(m.data)[at]);
  }
}

inline int64_t item_size(int dtype) {
  switch (dtype) {
    case U8: case I8: return 1;
    case I16: case HALF: case BFLOAT16: return 2;
    case I32: case FLOAT: return 4;
    default: return 8;
  }
}

struct Call {
  Matrix x, ids, weights;
  Experts w_in, w_up, w_out, b_in, b_up, b_out;
  int activation, gating;
  bool up_first, weight_on_input;
  double first, second;
  int out_dtype;
  void* out;
  int threads;
  // In the order of the op's arguments.
  std::array<Experts*, 6> lists() { return {&w_in, &w_up, &w_out, &b_in, &b_up, &b_out}; }
};

// One row of pre-activations [width] (bias included) to the input of the second projection [inner].
template <class D> void activate_row(const Call& c, const Acc<D>* row, int64_t inner, Acc<D>* to) {
  const Acc<D>*gate = row, *up = row + (c.gating == INTERLEAVED ? 1 : inner);
  if (c.gating == PLAIN) up = nullptr;
  else if (c.up_first) std::swap(gate, up);
  activate<D>(c.activation, gate, up, c.gating == INTERLEAVED ? 2 : 1, inner, Acc<D>(c.first), Acc<D>(c.second), to);
}

// VECTORS vectors of columns of the weighted sum of one token from column j on, slot 0 first.
template <class D, bool RAW, int VECTORS, class T>
inline void combine_lanes(const Call& c, const Routing& r, const Acc<D>* y, int64_t t, int64_t j, T* out) {
  using A = Acc<D>;
  constexpr int W = WIDTH<A>;
  int64_t top_k = c.ids.columns, hidden = c.w_out.out;
  Vec<A> sum[VECTORS] = {};
  for (int64_t k = 0; k < top_k; ++k) {
    int64_t row = r.position[t * top_k + k];
    if (row < 0) continue;
    A scale = c.weight_on_input ? A(1) : scalar<A>(c.weights, t, k);
    const A* from = y + row * hidden + j;
    const D* bias = RAW && c.b_out.present ? static_cast<const D*>(c.b_out.of(Routing::id(c.ids, t, k), sizeof(D))) + j : nullptr;
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      Vec<A> term = load(from + v * W);
      if (bias) term += load(bias + v * W);
      if (RAW) term = rounded_lanes(term, static_cast<D*>(nullptr));
      sum[v] += term * scale;
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; ++v) store_lanes(out + v * W, sum[v]);
}

template <class D, bool RAW, class T>
void combine_columns(const Call& c, const Routing& r, const Acc<D>* y, int64_t t, int64_t begin, int64_t end, T* out) {
  using A = Acc<D>;
  constexpr int W = WIDTH<A>;
  int64_t j = begin, top_k = c.ids.columns, hidden = c.w_out.out;
  for (; j + 4 * W <= end; j += 4 * W) combine_lanes<D, RAW, 4>(c, r, y, t, j, out + j);
  for (; j + W <= end; j += W) combine_lanes<D, RAW, 1>(c, r, y, t, j, out + j);
  for (; j < end; ++j) {
    A sum = 0;
    for (int64_t k = 0; k < top_k; ++k) {
      int64_t row = r.position[t * top_k + k];
      if (row < 0) continue;
      A term = y[row * hidden + j];
      if (RAW && c.b_out.present) term += widen(static_cast<const D*>(c.b_out.of(Routing::id(c.ids, t, k), sizeof(D)))[j]);
      if (RAW) term = rounded<D>(term);
      sum += term * (c.weight_on_input ? A(1) : scalar<A>(c.weights, t, k));
    }
    out[j] = narrow<T>(Acc<T>(sum));
  }
}

// Columns [begin, end) of one token's result. RAW: the rows of y lack their bias and their rounding to D.
template <class D, bool RAW> void combine_row(const Call& c, const Routing& r, const Acc<D>* y, int64_t t, int64_t begin, int64_t end) {
  int64_t at = t * c.w_out.out;
  switch (c.out_dtype) {
    case HALF: return combine_columns<D, RAW>(c, r, y, t, begin, end, static_cast<F16*>(c.out) + at);
    case BFLOAT16: return combine_columns<D, RAW>(c, r, y, t, begin, end, static_cast<BF16*>(c.out) + at);
    case FLOAT: return combine_columns<D, RAW>(c, r, y, t, begin, end, static_cast<float*>(c.out) + at);
    default: return combine_columns<D, RAW>(c, r, y, t, begin, end, static_cast<double*>(c.out) + at);
  }
}

template <class D> class Body {
  using A = Acc<D>;

 public:
  Body(const Call& call, const Routing& routing)
      : c(call), r(routing), slots(int64_t(routing.order.size())), top_k(call.ids.columns),
        width(call.gating == SEPARATE ? 2 * call.w_in.out : call.w_in.out), inner(call.w_out.in), hidden(call.w_out.out),
        h(new A[slots * width]), a(new A[slots * inner]), y(new A[slots * hidden]), in_rows(slots), a_rows(slots) {
    read_rows();
    for (int64_t s = 0; s < slots; ++s) a_rows[s] = a.get() + s * inner;
  }

  void run() {
    if (c.threads <= 1) return phases(0, 1);
#pragma omp parallel num_threads(c.threads)
    phases(omp_get_thread_num(), omp_get_num_threads());
  }

 private:
  // Rows of x in the accumulation dtype, one per slot: pointers into x where nothing has to be converted.
  void read_rows() {
    int64_t n = c.x.columns;
    bool direct = std::is_same<D, A>::value && c.x.column_stride == 1;
    const D* data = reinterpret_cast<const D*>(c.x.data);
    if (!c.weight_on_input && direct) {
      for (int64_t s = 0; s < slots; ++s) in_rows[s] = reinterpret_cast<const A*>(data + (r.order[s] / top_k) * c.x.row_stride);
      return;
    }
    xs.reset(new A[(c.weight_on_input ? slots : c.x.rows) * n]);
    if (c.weight_on_input) {
      for (int64_t s = 0; s < slots; ++s) {
        int64_t token = r.order[s] / top_k;
        A scale = scalar<A>(c.weights, token, r.order[s] % top_k);
        for (int64_t i = 0; i < n; ++i)
          xs[s * n + i] = rounded<D>(widen(data[token * c.x.row_stride + i * c.x.column_stride]) * scale);
        in_rows[s] = xs.get() + s * n;
      }
      return;
    }
    for (int64_t t = 0; t < c.x.rows; ++t)
      for (int64_t i = 0; i < n; ++i) xs[t * n + i] = widen(data[t * c.x.row_stride + i * c.x.column_stride]);
    for (int64_t s = 0; s < slots; ++s) in_rows[s] = xs.get() + (r.order[s] / top_k) * n;
  }

  void phases(int thread, int threads) {
    each(c.w_in, c.b_in, in_rows.data(), c.x.columns, h.get(), width, thread, threads);
    if (c.gating == SEPARATE) each(c.w_up, c.b_up, in_rows.data(), c.x.columns, h.get() + c.w_in.out, width, thread, threads);
    wait(threads);
    activate_rows(slots * thread / threads, slots * (thread + 1) / threads);
    wait(threads);
    each(c.w_out, c.b_out, a_rows.data(), inner, y.get(), hidden, thread, threads);
    wait(threads);
    // Cut where whole vectors end, so that a column is summed by the same instructions for any number of threads.
    int64_t steps = (hidden + 63) / 64;
    combine(std::min(hidden, steps * thread / threads * 64), std::min(hidden, steps * (thread + 1) / threads * 64));
  }

  static void wait(int threads) {
    if (threads > 1) {
#pragma omp barrier
    }
  }

  // This thread's share of one projection. The features of all groups in a row are cut evenly, in steps that fill vectors.
  void each(const Experts& w, const Experts& b, const A* const* rows, int64_t n, A* out, int64_t ld, int thread, int threads) {
    constexpr int64_t STEP = 64;
    int64_t steps = (w.out + STEP - 1) / STEP, total = steps * int64_t(r.groups.size());
    int64_t begin = total * thread / threads, end = total * (thread + 1) / threads;
    while (begin < end) {
      const Routing::Group& group = r.groups[begin / steps];
      int64_t first = begin % steps, last = std::min(steps, first + (end - begin));
      Weight weight{w.of(group.expert, sizeof(D)), w.ld, w.contiguous_in};
      const D* bias = b.present ? static_cast<const D*>(b.of(group.expert, sizeof(D))) : nullptr;
      project<D>(weight, rows + group.begin, group.end - group.begin, n, bias, out + group.begin * ld, ld, first * STEP,
                 std::min(w.out, last * STEP));
      begin += last - first;
    }
  }

  void activate_rows(int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) activate_row<D>(c, h.get() + s * width, inner, a.get() + s * inner);
  }

  // Columns [begin, end) of every token.
  void combine(int64_t begin, int64_t end) {
    for (int64_t t = 0; t < c.x.rows; ++t) combine_row<D, false>(c, r, y.get(), t, begin, end);
  }

  const Call& c;
  const Routing& r;
  const int64_t slots, top_k, width, inner, hidden;
  std::unique_ptr<A[]> xs, h, a, y;
  std::vector<const A*> in_rows, a_rows;
};

}  // namespace
