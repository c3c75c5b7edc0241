/* cuBLAS and cuBLASLt: matrices are checked as to place, length and leading dimension; the result is poison. */
#include "imitation.h"

/* Numbers of CUDA 13's headers. */
enum {
  CUBLASLT_MATMUL_DESC_A_SCALE_POINTER = 17, CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
  CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = 18, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,
  CUBLASLT_MATMUL_DESC_SCALE_TYPE = 1, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5, CUBLASLT_MATRIX_LAYOUT_COLS = 3,
  CUBLASLT_MATRIX_LAYOUT_LD = 4, CUBLASLT_MATRIX_LAYOUT_ORDER = 1, CUBLASLT_MATRIX_LAYOUT_ROWS = 2,
  CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6, CUBLASLT_MATRIX_LAYOUT_TYPE = 0, CUBLASLT_ORDER_ROW = 1,
  CUDA_C_32F = 4, CUDA_C_64F = 5, CUDA_R_16BF = 14, CUDA_R_16F = 2, CUDA_R_32F = 0, CUDA_R_32I = 10, CUDA_R_64F = 1,
};

enum { SUCCESS = 0, INVALID_VALUE = 7, HEURISTIC_RESULT_BYTES = 96 };

static size_t width(int type) {
  switch (type) {
  case CUDA_R_16F: case CUDA_R_16BF: return 2;
  case CUDA_R_32F: case CUDA_R_32I: return 4;
  case CUDA_R_64F: case CUDA_C_32F: return 8;
  case CUDA_C_64F: return 16;
  default: return 1;
  }
}

/* Elements from the first to the last of a column-major matrix, repeated `batch` times. */
static size_t extent(long rows, long cols, long ld, long stride, long batch) {
  return rows <= 0 || cols <= 0 || batch <= 0 ? 0 : (size_t)(stride * (batch - 1) + ld * (cols - 1) + rows);
}

typedef struct { const void *at; int type; long ld, stride; } matrix;

static int gemm(const char *call, int ta, int tb, long m, long n, long k, matrix a, matrix b, matrix c, long batch, int adds) {
  long ra = ta ? k : m, ca = ta ? m : k, rb = tb ? n : k, cb = tb ? k : n;
  if (m < 0 || n < 0 || k < 0 || a.ld < (ra > 1 ? ra : 1) || b.ld < (rb > 1 ? rb : 1) || c.ld < (m > 1 ? m : 1)) return INVALID_VALUE;
  if (!m || !n || !batch) return SUCCESS;
  int device = current_device();
  on_device(call, "A", a.at, extent(ra, ca, a.ld, a.stride, batch) * width(a.type), device);
  on_device(call, "B", b.at, extent(rb, cb, b.ld, b.stride, batch) * width(b.type), device);
  char *out = on_device(call, "C", c.at, extent(m, n, c.ld, c.stride, batch) * width(c.type), device);
  for (long i = 0; !adds && i < batch; i++)
    for (long j = 0; j < n; j++) poison(out + (i * c.stride + j * c.ld) * width(c.type), m * width(c.type));
  return SUCCESS;
}
#define M(at, type, ld, stride) ((matrix){at, type, ld, stride})

/* beta is read from the host, as torch passes it; a beta of zero means that C is written only. */
static int adds(const void *beta, int type) {
  static const char zeros[16];
  return memcmp(beta, zeros, width(type)) != 0;
}
#define GEMM(letter, scalar, T)                                                                                                \
  int cublas##letter##gemm_v2(void *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda,         \
                              const void *b, int ldb, const void *beta, void *c, int ldc) {                                    \
    return gemm("cublas" #letter "gemm", ta, tb, m, n, k, M(a, T, lda, 0), M(b, T, ldb, 0), M(c, T, ldc, 0), 1, adds(beta, T)); \
  }                                                                                                                            \
  int cublas##letter##gemmStridedBatched(void *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,       \
                                         int lda, long long sa, const void *b, int ldb, long long sb, const void *beta,        \
                                         void *c, int ldc, long long sc, int batch) {                                          \
    return gemm("cublas" #letter "gemmStridedBatched", ta, tb, m, n, k, M(a, T, lda, sa), M(b, T, ldb, sb), M(c, T, ldc, sc),   \
                batch, adds(beta, T));                                                                                         \
  }                                                                                                                            \
  int cublas##letter##gemv_v2(void *h, int t, int m, int n, const void *alpha, const void *a, int lda, const void *x, int ix,  \
                              const void *beta, void *y, int iy) {                                                             \
    long nx = t ? m : n, ny = t ? n : m;                                                                                       \
    on_device("cublas" #letter "gemv", "A", a, extent(m, n, lda, 0, 1) * width(T), current_device());                          \
    on_device("cublas" #letter "gemv", "x", x, extent(1, nx, labs(ix), 0, 1) * width(T), current_device());                    \
    on_device("cublas" #letter "gemv", "y", y, extent(1, ny, labs(iy), 0, 1) * width(T), current_device());                    \
    return SUCCESS;                                                                                                            \
  }
GEMM(S, float, CUDA_R_32F)
GEMM(D, double, CUDA_R_64F)
GEMM(C, float2, CUDA_C_32F)
GEMM(Z, double2, CUDA_C_64F)

int cublasGemmEx(void *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int at, int lda, const void *b,
                 int bt, int ldb, const void *beta, void *c, int ct, int ldc, int compute, int algorithm) {
  return gemm("cublasGemmEx", ta, tb, m, n, k, M(a, at, lda, 0), M(b, bt, ldb, 0), M(c, ct, ldc, 0), 1, adds(beta, CUDA_R_16F));
}
int cublasSgemmEx(void *h, int ta, int tb, int m, int n, int k, const float *alpha, const void *a, int at, int lda, const void *b,
                  int bt, int ldb, const float *beta, void *c, int ct, int ldc) {
  return gemm("cublasSgemmEx", ta, tb, m, n, k, M(a, at, lda, 0), M(b, bt, ldb, 0), M(c, ct, ldc, 0), 1, *beta != 0);
}
int cublasGemmStridedBatchedEx(void *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int at, int lda,
                               long long sa, const void *b, int bt, int ldb, long long sb, const void *beta, void *c, int ct,
                               int ldc, long long sc, int batch, int compute, int algorithm) {
  return gemm("cublasGemmStridedBatchedEx", ta, tb, m, n, k, M(a, at, lda, sa), M(b, bt, ldb, sb), M(c, ct, ldc, sc), batch,
              adds(beta, CUDA_R_16F));
}
static int dot(const char *call, int n, const void *x, int xt, int ix, const void *y, int yt, int iy) {
  on_device(call, "x", x, extent(1, n, labs(ix), 0, 1) * width(xt), current_device());
  on_device(call, "y", y, extent(1, n, labs(iy), 0, 1) * width(yt), current_device());
  return SUCCESS;
}
int cublasSdot_v2(void *h, int n, const void *x, int ix, const void *y, int iy, void *r) {
  return dot("cublasSdot", n, x, CUDA_R_32F, ix, y, CUDA_R_32F, iy);
}
int cublasDdot_v2(void *h, int n, const void *x, int ix, const void *y, int iy, void *r) {
  return dot("cublasDdot", n, x, CUDA_R_64F, ix, y, CUDA_R_64F, iy);
}
int cublasDotEx(void *h, int n, const void *x, int xt, int ix, const void *y, int yt, int iy, void *r, int rt, int e) {
  return dot("cublasDotEx", n, x, xt, ix, y, yt, iy);
}

/* handles */
int cublasCreate_v2(void **h) { *h = token(); return SUCCESS; }
int cublasGetPointerMode_v2(void *h, int *m) { *m = 0; return SUCCESS; }
int cublasGetMathMode(void *h, int *m) { *m = 0; return SUCCESS; }
int cublasGetVersion_v2(void *h, int *m) { *m = 130100; return SUCCESS; }
int cublasGetStream_v2(void *h, void **s) { *s = NULL; return SUCCESS; }
int cublasSetWorkspace_v2(void *h, void *w, size_t n) {
  on_device("cublasSetWorkspace", "the workspace", w, n, current_device());
  return SUCCESS;
}

/* cuBLASLt: descriptors keep what they are told, by attribute. */
enum { ATTRIBUTES = 64 };
typedef struct { uint64_t values[ATTRIBUTES]; } description;
static int set(description *d, int attribute, const void *value, size_t bytes) {
  if (attribute < 0 || attribute >= ATTRIBUTES || bytes > 8) return INVALID_VALUE;
  d->values[attribute] = 0;
  memcpy(&d->values[attribute], value, bytes);
  return SUCCESS;
}
int cublasLtCreate(void **h) { *h = token(); return SUCCESS; }
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulDescCreate(description **d, int compute, int scale) {
  *d = calloc(1, sizeof **d);
  (*d)->values[CUBLASLT_MATMUL_DESC_SCALE_TYPE] = scale;
  return SUCCESS;
}
int cublasLtMatmulDescSetAttribute(description *d, int a, const void *v, size_t n) { return set(d, a, v, n); }
int cublasLtMatmulDescDestroy(description *d) { free(d); return SUCCESS; }
int cublasLtMatrixLayoutCreate(description **d, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  *d = calloc(1, sizeof **d);
  (*d)->values[CUBLASLT_MATRIX_LAYOUT_TYPE] = type;
  (*d)->values[CUBLASLT_MATRIX_LAYOUT_ROWS] = rows;
  (*d)->values[CUBLASLT_MATRIX_LAYOUT_COLS] = cols;
  (*d)->values[CUBLASLT_MATRIX_LAYOUT_LD] = ld;
  (*d)->values[CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT] = 1;
  return SUCCESS;
}
int cublasLtMatrixLayoutSetAttribute(description *d, int a, const void *v, size_t n) { return set(d, a, v, n); }
int cublasLtMatrixLayoutDestroy(description *d) { free(d); return SUCCESS; }
int cublasLtMatmulPreferenceCreate(void **d) { *d = token(); return SUCCESS; }
int cublasLtMatmulAlgoGetHeuristic(void *h, description *op, void *a, void *b, void *c, void *d, void *p, int most,
                                   void *results, int *found) {
  memset(results, 0, HEURISTIC_RESULT_BYTES);
  *found = 1;
  return SUCCESS;
}

static size_t layout_bytes(const description *l) {
  const uint64_t *v = l->values;
  int by_rows = v[CUBLASLT_MATRIX_LAYOUT_ORDER] == CUBLASLT_ORDER_ROW;
  long rows = v[by_rows ? CUBLASLT_MATRIX_LAYOUT_COLS : CUBLASLT_MATRIX_LAYOUT_ROWS];
  long cols = v[by_rows ? CUBLASLT_MATRIX_LAYOUT_ROWS : CUBLASLT_MATRIX_LAYOUT_COLS];
  return width(v[CUBLASLT_MATRIX_LAYOUT_TYPE]) * extent(rows, cols, v[CUBLASLT_MATRIX_LAYOUT_LD],
                                                        v[CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET],
                                                        (int32_t)v[CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT]);
}
int cublasLtMatmul(void *h, description *op, const void *alpha, const void *a, description *al, const void *b, description *bl,
                   const void *beta, const void *c, description *cl, void *d, description *dl, const void *algorithm,
                   void *workspace, size_t workspace_bytes, void *stream) {
  static const struct { int attribute; const char *name; } pointers[] = {
      {CUBLASLT_MATMUL_DESC_BIAS_POINTER, "the bias"}, {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, "the epilogue's result"},
      {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, "A's scale"}, {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, "B's scale"}};
  int device = current_device();
  for (size_t i = 0; i < sizeof pointers / sizeof *pointers; i++) {
    const void *at = (const void *)op->values[pointers[i].attribute];
    if (at) on_device("cublasLtMatmul", pointers[i].name, at, 1, device);
  }
  on_device("cublasLtMatmul", "A", a, layout_bytes(al), device);
  on_device("cublasLtMatmul", "B", b, layout_bytes(bl), device);
  if (c && adds(beta, CUDA_R_32F)) on_device("cublasLtMatmul", "C", c, layout_bytes(cl), device);
  on_device("cublasLtMatmul", "D", d, layout_bytes(dl), device);
  on_device("cublasLtMatmul", "the workspace", workspace, workspace_bytes, device);
  return SUCCESS;
}
