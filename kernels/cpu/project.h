// One projection of one expert for a few rows: out[m][j] = round(sum over i of w[j][i] * rows[m][i] + bias[j]).
// A sum has the same order for any number of rows, so a token's result does not depend on which tokens share its expert.
namespace {

// Weight of one expert. contiguous_in: w[j * ld + i] (dot products), else w[i * ld + j] (sums of rows).
struct Weight {
  const void* data;
  int64_t ld;
  bool contiguous_in;
};

template <class D, int FEATURES, int ROWS>
inline void dots(const D* w, int64_t ld, const Acc<D>* const* rows, int64_t n, const D* bias, Acc<D>* out, int64_t ld_out) {
  using A = Acc<D>;
  constexpr int W = WIDTH<A>;
  Vec<A> acc[ROWS][FEATURES] = {};
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    Vec<A> r[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) r[m] = load(rows[m] + i);
#pragma GCC unroll 8
    for (int j = 0; j < FEATURES; ++j) {
      Vec<A> weight = load(w + j * ld + i);
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) acc[m][j] = multiply_add(weight, r[m], acc[m][j]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < FEATURES; ++j) {
      A sum = lanes_sum<A>(acc[m][j]);
      for (int64_t rest = i; rest < n; ++rest) sum = multiply_add(widen(w[j * ld + rest]), rows[m][rest], sum);
      out[m * ld_out + j] = rounded<D>(bias ? sum + widen(bias[j]) : sum);
    }
}

template <class D, int VECTORS, int ROWS>
inline void sums(const D* w, int64_t ld, const Acc<D>* const* rows, int64_t n, const D* bias, Acc<D>* out, int64_t ld_out) {
  using A = Acc<D>;
  constexpr int W = WIDTH<A>;
  Vec<A> acc[ROWS][VECTORS] = {};
  for (int64_t i = 0; i < n; ++i) {
    A r[ROWS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) r[m] = rows[m][i];
#pragma GCC unroll 16
    for (int j = 0; j < VECTORS; ++j) {
      Vec<A> weight = load(w + i * ld + j * W);
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; ++m) acc[m][j] = multiply_add(weight, Vec<A>{} + r[m], acc[m][j]);
    }
  }
  for (int m = 0; m < ROWS; ++m)
    for (int j = 0; j < VECTORS; ++j) {
      A lane[W];
      store<A>(lane, acc[m][j]);
      for (int l = 0; l < W; ++l) {
        int64_t column = int64_t(j) * W + l;
        out[m * ld_out + column] = rounded<D>(bias ? lane[l] + widen(bias[column]) : lane[l]);
      }
    }
}

template <class D, int ROWS>
void some_rows(const Weight& w, const Acc<D>* const* rows, int64_t n, const D* bias, Acc<D>* out, int64_t ld_out, int64_t begin, int64_t end) {
  using A = Acc<D>;
  const D* data = static_cast<const D*>(w.data);
  int64_t j = begin;
  auto shift = [&](int64_t column) { return bias ? bias + column : nullptr; };
  if (w.contiguous_in) {
    constexpr int BLOCK = ROWS == 1 ? 8 : ACCUMULATORS / 4;
    for (; j + BLOCK <= end; j += BLOCK) dots<D, BLOCK, ROWS>(data + j * w.ld, w.ld, rows, n, shift(j), out + j, ld_out);
    for (; j < end; ++j) dots<D, 1, ROWS>(data + j * w.ld, w.ld, rows, n, shift(j), out + j, ld_out);
    return;
  }
  constexpr int W = WIDTH<A>, VECTORS = ROWS == 1 ? ACCUMULATORS : ROWS == 2 ? ACCUMULATORS / 2 : ACCUMULATORS / 4;
  for (; j + VECTORS * W <= end; j += VECTORS * W) sums<D, VECTORS, ROWS>(data + j, w.ld, rows, n, shift(j), out + j, ld_out);
  for (; j + 2 * W <= end; j += 2 * W) sums<D, 2, ROWS>(data + j, w.ld, rows, n, shift(j), out + j, ld_out);
  for (; j + W <= end; j += W) sums<D, 1, ROWS>(data + j, w.ld, rows, n, shift(j), out + j, ld_out);
  for (; j < end; ++j)
    for (int m = 0; m < ROWS; ++m) {
      A sum = 0;
      for (int64_t i = 0; i < n; ++i) sum = multiply_add(widen(data[i * w.ld + j]), rows[m][i], sum);
      out[m * ld_out + j] = rounded<D>(bias ? sum + widen(bias[j]) : sum);
    }
}

// Features [begin, end) of all `count` rows; a block of features is small enough that its weights stay in cache for the later rows.
template <class D>
void project(const Weight& w, const Acc<D>* const* rows, int64_t count, int64_t n, const D* bias, Acc<D>* out, int64_t ld_out,
             int64_t begin, int64_t end) {
  int64_t block = count <= 4 ? end - begin : w.contiguous_in ? 16 : 4 * WIDTH<Acc<D>>;
  if (block < 1) return;
  for (int64_t j = begin; j < end; j += block) {
    int64_t stop = j + block < end ? j + block : end;
    int64_t m = 0;
    for (; m + 4 <= count; m += 4) some_rows<D, 4>(w, rows + m, n, bias, out + m * ld_out, ld_out, j, stop);
    if (count - m == 3) some_rows<D, 3>(w, rows + m, n, bias, out + m * ld_out, ld_out, j, stop);
    if (count - m == 2) some_rows<D, 2>(w, rows + m, n, bias, out + m * ld_out, ld_out, j, stop);
    if (count - m == 1) some_rows<D, 1>(w, rows + m, n, bias, out + m * ld_out, ld_out, j, stop);
  }
}

}  // namespace
