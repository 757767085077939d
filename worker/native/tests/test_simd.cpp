// F16 of one set, lane by lane against plain floats: of the baseline, or compiled with a set's flags and
// -DPAGECAST_SET=avx2 -DPAGECAST_SIMD='"../src/simd/avx2.h"' of that one. Says so and passes where the
// machine lacks the set.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>

#include PAGECAST_SIMD

#include "../src/simd.h"
#include "check.h"
#include "matrix.h"

namespace pagecast::PAGECAST_SET {
namespace {

struct Lanes {
  float at[kLanes];
  explicit Lanes(F16 v) { store(at, v); }
};

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

float one_exp(float x) { return Lanes(exp(broadcast(x))).at[0]; }

void test_arithmetic() {
  float a[kLanes], b[kLanes], c[kLanes];
  Random random(1);
  for (int i = 0; i < kLanes; ++i)
    a[i] = random.uniform(9), b[i] = random.uniform(9), c[i] = random.uniform(9);
  const F16 x = load(a), y = load(b), z = load(c);
  const Lanes add(x + y), sub(x - y), mul(x * y), div(x / y), mad(fma(x, y, z)), root(sqrt(x * x));
  const Lanes big(max(x, y)), small(min(x, y)), picked(select(less(x, y), z, x));
  for (int i = 0; i < kLanes; ++i) {
    CHECK(same_bits(add.at[i], a[i] + b[i]) && same_bits(sub.at[i], a[i] - b[i]), "lane %d", i);
    CHECK(same_bits(mul.at[i], a[i] * b[i]) && same_bits(div.at[i], a[i] / b[i]), "lane %d", i);
    CHECK(same_bits(mad.at[i], Native::kFused ? std::fma(a[i], b[i], c[i]) : a[i] * b[i] + c[i]), "lane %d",
          i);
    CHECK(same_bits(root.at[i], std::sqrt(a[i] * a[i])), "lane %d", i);
    CHECK(big.at[i] == std::max(a[i], b[i]) && small.at[i] == std::min(a[i], b[i]), "lane %d", i);
    CHECK(same_bits(picked.at[i], a[i] < b[i] ? c[i] : a[i]), "lane %d", i);
  }
}

void test_some_lanes() {
  float from[kLanes];
  for (int i = 0; i < kLanes; ++i) from[i] = static_cast<float>(i + 1);
  for (int n = -3; n <= kLanes + 3; ++n) {
    float guarded[kLanes];
    for (int i = 0; i < kLanes; ++i) guarded[i] = i < n ? from[i] : kNaN;
    const Lanes loaded(load_n(guarded, n)), picked(select(first_n(n), load(from), zero()));
    float stored[kLanes] = {};
    store_n(stored, load(from), n);
    for (int i = 0; i < kLanes; ++i) {
      const float expected = i < n ? from[i] : 0.0f;
      CHECK(same_bits(loaded.at[i], expected), "n %d lane %d", n, i);
      CHECK(same_bits(picked.at[i], expected), "n %d lane %d", n, i);
      CHECK(same_bits(stored[i], expected), "n %d lane %d", n, i);
    }
  }
}

void test_sum_is_a_fixed_tree() {
  Random random(2);
  for (int round = 0; round < 1000; ++round) {
    float a[kLanes], tree[kLanes], peak = -kInf;
    for (int i = 0; i < kLanes; ++i)
      tree[i] = a[i] = random.uniform(round % 2 == 0 ? 1.0f : 1e6f), peak = std::max(peak, a[i]);
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) tree[i] = tree[i] + tree[i + half];
    CHECK(same_bits(sum(load(a)), tree[0]), "%g is not %g", sum(load(a)), tree[0]);
    CHECK(max_lane(load(a)) == peak, "%g is not %g", max_lane(load(a)), peak);
  }
}

void test_max_drops_a_nan_on_the_left_and_keeps_one_on_the_right() {
  CHECK(Lanes(max(broadcast(kNaN), broadcast(1))).at[3] == 1.0f, "left");
  CHECK(std::isnan(Lanes(max(broadcast(1), broadcast(kNaN))).at[3]), "right");
  CHECK(Lanes(min(broadcast(kNaN), broadcast(1))).at[3] == 1.0f, "left");
  CHECK(std::isnan(Lanes(min(broadcast(1), broadcast(kNaN))).at[3]), "right");
  CHECK(std::isnan(sum(select(first_n(1), broadcast(kNaN), zero()))), "a sum keeps it");
}

void test_exp() {
  double worst = 0;
  float worst_at = 0, before = 0;
  for (float x = -87.33f; x < 88.72284f; x += std::max(1e-5f * std::fabs(x), 1e-6f)) {
    const double exact = std::exp(static_cast<double>(x));
    const float rounded = static_cast<float>(exact);
    const double ulp = std::isinf(rounded) ? std::ldexp(1.0, 104)
                                           : std::nextafter(rounded, kInf) - static_cast<double>(rounded);
    const double error = std::fabs(one_exp(x) - exact) / (std::isinf(ulp) ? std::ldexp(1.0, 104) : ulp);
    if (!(error <= worst)) worst = error, worst_at = x;
    CHECK(one_exp(x) >= before * 0.9999999f, "falls at %.9g", x);
    before = one_exp(x);
  }
  std::printf("exp: at most %.3f ulp, at %.9g\n", worst, worst_at);
  CHECK(worst <= 2.0, "%.3f ulp at %.9g", worst, worst_at);
  CHECK(same_bits(one_exp(0.0f), 1.0f) && same_bits(one_exp(-0.0f), 1.0f), "at 0");
  for (const float x : {-87.34f, -100.0f, -1e10f, -std::numeric_limits<float>::max(), -kInf})
    CHECK(same_bits(one_exp(x), 0.0f), "%g gives %g", x, one_exp(x));
  for (const float x : {88.72284f, 89.0f, 128.0f, 1e10f, std::numeric_limits<float>::max(), kInf})
    CHECK(one_exp(x) == kInf, "%g gives %g", x, one_exp(x));
  CHECK(std::isfinite(one_exp(std::nextafter(88.72284f, 0.0f))), "the last one that is finite");
  CHECK(std::isnan(one_exp(kNaN)) && std::isnan(one_exp(-kNaN)), "NaN");
}

bool machine_has_it() {
  const std::string_view name = PAGECAST_SIMD;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (name.find("avx512") != name.npos)
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (name.find("avx2") != name.npos) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return !name.empty();
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET

int main() {
  using namespace pagecast::PAGECAST_SET;
  if (!machine_has_it()) {
    std::printf("skipped: this machine lacks the set\n");
    return 0;
  }
  test_arithmetic();
  test_some_lanes();
  test_sum_is_a_fixed_tree();
  test_max_drops_a_nan_on_the_left_and_keeps_one_on_the_right();
  test_exp();
  return report();
}
