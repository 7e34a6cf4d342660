// Sinkhorn normalisation of the hyper-connection mix, forward and backward.
//
// Layout: component-major [16][n], component 4*j+k is entry (row j, column k) of a token's
// 4x4 matrix. n is a multiple of LANES. All loops over lanes vectorise.
//
//   K = softmax of each row + EPS;  K /= column sums + EPS
//   repeat iters-1 times:  K /= row sums + EPS;  K /= column sums + EPS
#include <math.h>
#include <string.h>

#define LANES 16
#define MAX_ITERS 64
#define EPS 1e-6f

typedef float Mat[16][LANES];
typedef float Vec4[4][LANES];

static inline void load(Mat k, const float *src, long n) {
  for (int c = 0; c < 16; c++) memcpy(k[c], src + c * n, sizeof k[c]);
}

static inline void store(float *dst, Mat k, long n) {
  for (int c = 0; c < 16; c++) memcpy(dst + c * n, k[c], sizeof k[c]);
}

static inline void softmax_rows(Mat k) {
  for (int j = 0; j < 4; j++)
    for (int l = 0; l < LANES; l++) {
      float top = k[4 * j][l], sum = 0;
      for (int q = 1; q < 4; q++) top = k[4 * j + q][l] > top ? k[4 * j + q][l] : top;
      for (int q = 0; q < 4; q++) sum += k[4 * j + q][l] = expf(k[4 * j + q][l] - top);
      for (int q = 0; q < 4; q++) k[4 * j + q][l] /= sum;
    }
}

// Divides each column (stride 4) or each row (stride 1) by its sum; keeps the reciprocals.
static inline void normalise(Mat k, Vec4 recip, int columns) {
  for (int i = 0; i < 4; i++) {
    const int at = columns ? i : 4 * i, step = columns ? 4 : 1;
    for (int l = 0; l < LANES; l++) {
      float r = 1.f / (k[at][l] + k[at + step][l] + k[at + 2 * step][l] + k[at + 3 * step][l] + EPS);
      recip[i][l] = r;
      for (int q = 0; q < 4; q++) k[at + q * step][l] *= r;
    }
  }
}

// Gradient of `normalise` with output `out`: g <- (g - sum(g * out)) * recip.
static inline void normalise_grad(Mat g, Mat out, Vec4 recip, int columns) {
  for (int i = 0; i < 4; i++) {
    const int at = columns ? i : 4 * i, step = columns ? 4 : 1;
    for (int l = 0; l < LANES; l++) {
      float s = 0;
      for (int q = 0; q < 4; q++) s += g[at + q * step][l] * out[at + q * step][l];
      for (int q = 0; q < 4; q++) g[at + q * step][l] = (g[at + q * step][l] - s) * recip[i][l];
    }
  }
}

void sink_fwd(const float *in, float *out, long n, int iters) {
#pragma omp parallel for schedule(static)
  for (long t = 0; t < n; t += LANES) {
    Mat k;
    Vec4 r;
    load(k, in + t, n);
    softmax_rows(k);
    for (int c = 0; c < 16; c++)
      for (int l = 0; l < LANES; l++) k[c][l] += EPS;
    normalise(k, r, 1);
    for (int i = 1; i < iters; i++) {
      normalise(k, r, 0);
      normalise(k, r, 1);
    }
    store(out + t, k, n);
  }
}

void sink_bwd(const float *in, const float *grad_out, float *grad_in, long n, int iters) {
#pragma omp parallel for schedule(static)
  for (long t = 0; t < n; t += LANES) {
    Mat outs[2 * MAX_ITERS], k, soft, g;
    Vec4 recips[2 * MAX_ITERS];
    const int steps = 2 * iters - 1;
    load(k, in + t, n);
    softmax_rows(k);
    memcpy(soft, k, sizeof k);
    for (int c = 0; c < 16; c++)
      for (int l = 0; l < LANES; l++) k[c][l] += EPS;
    for (int i = 0; i < steps; i++) {
      normalise(k, recips[i], i % 2 == 0);
      memcpy(outs[i], k, sizeof k);
    }
    load(g, grad_out + t, n);
    for (int i = steps - 1; i >= 0; i--) normalise_grad(g, outs[i], recips[i], i % 2 == 0);
    for (int j = 0; j < 4; j++)
      for (int l = 0; l < LANES; l++) {
        float s = 0;
        for (int q = 0; q < 4; q++) s += g[4 * j + q][l] * soft[4 * j + q][l];
        for (int q = 0; q < 4; q++) g[4 * j + q][l] = (g[4 * j + q][l] - s) * soft[4 * j + q][l];
      }
    store(grad_in + t, g, n);
  }
}
