/* cuDNN 9: the graph API (convolutions, attention), batch norm, and the layout of recurrent weights. Descriptors keep what they
   are told; every graph has one engine; running one checks that each tensor's pointer holds the tensor. */
#include "imitation.h"

/* Numbers of cuDNN 9's headers; the headers' own declarations would not go with plain types. */
enum {
  CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE = 303, CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED = 304,
  CUDNN_ATTR_ENGINECFG_ENGINE = 300, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH = 201,
  CUDNN_ATTR_ENGINEHEUR_RESULTS = 202, CUDNN_ATTR_ENGINE_GLOBAL_INDEX = 1301,
  CUDNN_ATTR_ENGINE_OPERATION_GRAPH = 1300, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG = 401,
  CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE = 402, CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT = 802,
  CUDNN_ATTR_TENSOR_DATA_TYPE = 901, CUDNN_ATTR_TENSOR_DIMENSIONS = 902, CUDNN_ATTR_TENSOR_IS_BY_VALUE = 908,
  CUDNN_ATTR_TENSOR_STRIDES = 903, CUDNN_ATTR_TENSOR_UNIQUE_ID = 906, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS = 1001,
  CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS = 1000, CUDNN_ATTR_VARIANT_PACK_WORKSPACE = 1003,
  CUDNN_BACKEND_TENSOR_DESCRIPTOR = 17, CUDNN_BIDIRECTIONAL = 1, CUDNN_DATA_BFLOAT16 = 9,
  CUDNN_DATA_COMPLEX_FP32 = 20, CUDNN_DATA_DOUBLE = 1, CUDNN_DATA_FLOAT = 0, CUDNN_DATA_HALF = 2,
  CUDNN_DATA_INT32 = 4, CUDNN_DATA_INT64 = 10, CUDNN_DATA_INT8 = 3, CUDNN_DATA_UINT32 = 19, CUDNN_GRU = 3,
  CUDNN_LSTM = 2, CUDNN_RNN_NO_BIAS = 0, CUDNN_TYPE_BACKEND_DESCRIPTOR = 15, CUDNN_TYPE_BOOLEAN = 2,
  CUDNN_TYPE_CHAR = 24, CUDNN_TYPE_DOUBLE = 5, CUDNN_TYPE_FRACTION = 26, CUDNN_TYPE_HANDLE = 0, CUDNN_TYPE_INT64 = 3,
  CUDNN_TYPE_VOID_PTR = 6, CUDNN_MAJOR = 9, CUDNN_MINOR = 20, CUDNN_PATCHLEVEL = 0,
};

enum { SUCCESS = 0, WORKSPACE = 1 << 16, MOST_DIMS = 8 };

static size_t width(int type) {
  switch (type) {
  case CUDNN_DATA_HALF: case CUDNN_DATA_BFLOAT16: return 2;
  case CUDNN_DATA_FLOAT: case CUDNN_DATA_INT32: case CUDNN_DATA_UINT32: return 4;
  case CUDNN_DATA_DOUBLE: case CUDNN_DATA_INT64: case CUDNN_DATA_COMPLEX_FP32: return 8;
  default: return 1;
  }
}
static size_t element_width(int type) {
  switch (type) {
  case CUDNN_TYPE_INT64: case CUDNN_TYPE_DOUBLE: case CUDNN_TYPE_VOID_PTR: case CUDNN_TYPE_BACKEND_DESCRIPTOR: case CUDNN_TYPE_HANDLE:
    return 8;
  case CUDNN_TYPE_BOOLEAN: case CUDNN_TYPE_CHAR: return 1;
  case CUDNN_TYPE_FRACTION: return 16;
  default: return 4;
  }
}

/* handles and what is only asked for */
size_t cudnnGetVersion(void) { return 10000 * CUDNN_MAJOR + 100 * CUDNN_MINOR + CUDNN_PATCHLEVEL; }
size_t cudnnGetCudartVersion(void) { return 13000; }
int cudnnGetProperty(int property, int *value) {
  *value = property == 0 ? CUDNN_MAJOR : property == 1 ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return SUCCESS;
}
const char *cudnnGetErrorString(int e) { return e ? "mock-cuda says no" : "CUDNN_STATUS_SUCCESS"; }
void cudnnGetLastErrorString(char *text, size_t n) { snprintf(text, n, "mock-cuda says no"); }
int cudnnCreate(void **h) { *h = calloc(1, 64); return SUCCESS; }
int cudnnSetStream(void **h, void *s) { *h = s; return SUCCESS; }
int cudnnGetStream(void **h, void **s) { *s = *h; return SUCCESS; }

/* ---- the graph API ---- */
typedef struct { int name, type; int64_t count; void *elements; } attribute;
typedef struct descriptor { int kind, used, room; attribute *attributes; const struct descriptor *graph; } descriptor;

int cudnnBackendCreateDescriptor(int kind, descriptor **out) {
  *out = calloc(1, sizeof **out);
  (*out)->kind = kind;
  return SUCCESS;
}
/* A plan outlives what it was made from, and looks into it when it runs. So nothing goes. */
int cudnnBackendDestroyDescriptor(descriptor *d) { return SUCCESS; }
int cudnnBackendFinalize(descriptor *d) { return SUCCESS; }

static const attribute *attribute_of(const descriptor *d, int name) {
  for (int i = 0; i < d->used; i++)
    if (d->attributes[i].name == name) return &d->attributes[i];
  return NULL;
}
int cudnnBackendSetAttribute(descriptor *d, int name, int type, int64_t count, const void *elements) {
  attribute *a = (attribute *)attribute_of(d, name);
  if (!a) {
    if (d->used == d->room) d->attributes = realloc(d->attributes, (d->room += 16) * sizeof *a);
    a = &d->attributes[d->used++];
    a->elements = NULL;
  }
  size_t bytes = count * element_width(type);
  a->name = name;
  a->type = type;
  a->count = count;
  a->elements = memcpy(realloc(a->elements, bytes ? bytes : 1), elements, bytes);
  return SUCCESS;
}
static int answer(int64_t value, int type, int64_t requested, int64_t *count, void *elements) {
  if (count) *count = 1;
  if (elements && requested) memcpy(elements, &value, element_width(type));
  return SUCCESS;
}
int cudnnBackendGetAttribute(descriptor *d, int name, int type, int64_t requested, int64_t *count, void *elements) {
  descriptor **found = elements;
  const attribute *a = attribute_of(d, name);
  switch (name) {
  case CUDNN_ATTR_ENGINEHEUR_RESULTS: /* one way to run it, filled into the caller's descriptor */
    if (count) *count = 1;
    if (elements && requested) found[0]->graph = *(descriptor **)attribute_of(d, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)->elements;
    return SUCCESS;
  case CUDNN_ATTR_ENGINECFG_ENGINE:
    if (a) break;
    if (count) *count = 1;
    if (elements && requested) found[0]->graph = d->graph;
    return SUCCESS;
  case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT: return answer(1, type, requested, count, elements);
  case CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED: return answer(0, type, requested, count, elements);
  case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
  case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE: return answer(WORKSPACE, type, requested, count, elements);
  case CUDNN_ATTR_ENGINE_GLOBAL_INDEX: if (!a) return answer(0, type, requested, count, elements);
  }
  int64_t have = a ? a->count : 0, given = have < requested ? have : requested;
  if (count) *count = have;
  if (elements && given) memcpy(elements, a->elements, given * element_width(a->type));
  return SUCCESS;
}

static int64_t integer(const descriptor *d, int name, int64_t otherwise) {
  const attribute *a = attribute_of(d, name);
  int64_t value = 0;
  if (!a || !a->count) return otherwise;
  memcpy(&value, a->elements, element_width(a->type) < 8 ? element_width(a->type) : 8);
  return value;
}
/* The tensor with this id among all that a descriptor refers to. */
static const descriptor *tensor_of(const descriptor *d, int64_t id, int depth) {
  if (d->kind == CUDNN_BACKEND_TENSOR_DESCRIPTOR) return integer(d, CUDNN_ATTR_TENSOR_UNIQUE_ID, -1) == id ? d : NULL;
  for (int i = 0; depth < 6 && i < d->used; i++) {
    const attribute *a = &d->attributes[i];
    for (int64_t j = 0; a->type == CUDNN_TYPE_BACKEND_DESCRIPTOR && j < a->count; j++) {
      const descriptor *next = ((descriptor **)a->elements)[j];
      const descriptor *found = next ? tensor_of(next, id, depth + 1) : NULL;
      if (found) return found;
    }
  }
  return NULL;
}
static size_t tensor_bytes(const descriptor *t) {
  const attribute *sizes = attribute_of(t, CUDNN_ATTR_TENSOR_DIMENSIONS), *strides = attribute_of(t, CUDNN_ATTR_TENSOR_STRIDES);
  int64_t last = 0;
  for (int64_t i = 0; sizes && strides && i < sizes->count; i++) {
    int64_t size = ((int64_t *)sizes->elements)[i];
    if (!size) return 0;
    last += (size - 1) * ((int64_t *)strides->elements)[i];
  }
  return (last + 1) * width((int)integer(t, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_DATA_INT8));
}
static const descriptor *graph_of(const descriptor *plan) {
  const attribute *a = attribute_of(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
  const descriptor *config = a ? *(descriptor **)a->elements : plan;
  if (config->graph) return config->graph;
  a = attribute_of(config, CUDNN_ATTR_ENGINECFG_ENGINE);
  const descriptor *engine = a ? *(descriptor **)a->elements : NULL;
  a = engine ? attribute_of(engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH) : NULL;
  return a ? *(descriptor **)a->elements : engine ? engine->graph : NULL;
}
int cudnnBackendExecute(void *h, descriptor *plan, descriptor *pack) {
  const attribute *ids = attribute_of(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const attribute *pointers = attribute_of(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  const descriptor *graph = graph_of(plan);
  if (!ids || !pointers || ids->count != pointers->count) refuse("cudnnBackendExecute", "ids and pointers do not match");
  for (int64_t i = 0; i < ids->count; i++) {
    char what[48];
    void *at = ((void **)pointers->elements)[i];
    int64_t id = ((int64_t *)ids->elements)[i];
    const descriptor *tensor = graph ? tensor_of(graph, id, 0) : NULL;
    if (tensor && (integer(tensor, CUDNN_ATTR_TENSOR_IS_BY_VALUE, 0) & 1)) continue; /* a scalar, on the host */
    snprintf(what, sizeof what, "tensor %ld", (long)id);
    if (tensor) on_device("cudnnBackendExecute", what, at, tensor_bytes(tensor), current_device());
    else if (!graph) on_device("cudnnBackendExecute", what, at, at ? 1 : 0, current_device());
    else refuse("cudnnBackendExecute", "no tensor of the graph has id %ld", (long)id);
  }
  const attribute *workspace = attribute_of(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
  if (workspace && workspace->count) on_device("cudnnBackendExecute", "the workspace", *(void **)workspace->elements, WORKSPACE, current_device());
  return SUCCESS;
}

/* ---- tensors, filters, batch norm ---- */
typedef struct { int type, count, format, sizes[MOST_DIMS], strides[MOST_DIMS]; } tensor;
int cudnnCreateTensorDescriptor(tensor **t) { *t = calloc(1, sizeof **t); return SUCCESS; }
int cudnnDestroyTensorDescriptor(tensor *t) { free(t); return SUCCESS; }
int cudnnSetTensorNdDescriptor(tensor *t, int type, int n, const int *sizes, const int *strides) {
  t->type = type;
  t->count = n;
  memcpy(t->sizes, sizes, n * sizeof(int));
  memcpy(t->strides, strides, n * sizeof(int));
  return SUCCESS;
}
int cudnnGetTensorNdDescriptor(const tensor *t, int most, int *type, int *n, int *sizes, int *strides) {
  int given = t->count < most ? t->count : most;
  if (type) *type = t->type;
  if (n) *n = t->count;
  if (sizes) memcpy(sizes, t->sizes, given * sizeof(int));
  if (strides) memcpy(strides, t->strides, given * sizeof(int));
  return SUCCESS;
}
int cudnnCreateFilterDescriptor(tensor **t) { return cudnnCreateTensorDescriptor(t); }
int cudnnDestroyFilterDescriptor(tensor *t) { return cudnnDestroyTensorDescriptor(t); }
int cudnnSetFilterNdDescriptor(tensor *t, int type, int format, int n, const int *sizes) {
  t->format = format;
  return cudnnSetTensorNdDescriptor(t, type, n, sizes, sizes);
}
int cudnnGetFilterNdDescriptor(const tensor *t, int most, int *type, int *format, int *n, int *sizes) {
  if (format) *format = t->format;
  return cudnnGetTensorNdDescriptor(t, most, type, n, sizes, NULL);
}
static void used(const char *call, const char *what, const tensor *t, const void *at) {
  size_t last = 0;
  for (int i = 0; i < t->count; i++) last += (size_t)(t->sizes[i] - 1) * t->strides[i];
  on_device(call, what, at, (last + 1) * width(t->type), current_device());
}
static void used_if_given(const char *call, const char *what, const tensor *t, const void *at) {
  if (at) used(call, what, t, at);
}
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int m, int o, tensor *x, tensor *z, tensor *y, tensor *s, void *a,
                                                             size_t *n) { *n = WORKSPACE; return SUCCESS; }
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int m, int o, tensor *x, tensor *y, tensor *dy, tensor *dz, tensor *dx,
                                                      tensor *s, void *a, size_t *n) { *n = WORKSPACE; return SUCCESS; }
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int m, int o, void *a, tensor *x, size_t *n) {
  *n = WORKSPACE;
  return SUCCESS;
}
int cudnnBatchNormalizationForwardTrainingEx(void *h, int mode, int ops, const void *alpha, const void *beta, tensor *xd, const void *x,
                                             tensor *zd, const void *z, tensor *yd, void *y, tensor *sd, const void *scale, const void *bias,
                                             double factor, void *mean, void *variance, double epsilon, void *saved_mean,
                                             void *saved_variance, void *activation, void *work, size_t work_bytes, void *reserve,
                                             size_t reserve_bytes) {
  const char *call = "cudnnBatchNormalizationForwardTrainingEx";
  used(call, "x", xd, x);
  used(call, "y", yd, y);
  used(call, "the scale", sd, scale);
  used(call, "the bias", sd, bias);
  used_if_given(call, "the running mean", sd, mean);
  used_if_given(call, "the running variance", sd, variance);
  used_if_given(call, "the saved mean", sd, saved_mean);
  used_if_given(call, "the saved variance", sd, saved_variance);
  on_device(call, "the workspace", work, work_bytes, current_device());
  on_device(call, "the reserve", reserve, reserve_bytes, current_device());
  return SUCCESS;
}
int cudnnBatchNormalizationForwardInference(void *h, int mode, const void *alpha, const void *beta, tensor *xd, const void *x, tensor *yd,
                                            void *y, tensor *sd, const void *scale, const void *bias, const void *mean,
                                            const void *variance, double epsilon) {
  const char *call = "cudnnBatchNormalizationForwardInference";
  used(call, "x", xd, x);
  used(call, "y", yd, y);
  used(call, "the scale", sd, scale);
  used(call, "the bias", sd, bias);
  used(call, "the mean", sd, mean);
  used(call, "the variance", sd, variance);
  return SUCCESS;
}
int cudnnBatchNormalizationBackwardEx(void *h, int mode, int ops, const void *a, const void *b, const void *c, const void *d, tensor *xd,
                                      const void *x, tensor *yd, const void *y, tensor *dyd, const void *dy, tensor *dzd, void *dz,
                                      tensor *dxd, void *dx, tensor *sd, const void *scale, const void *bias, void *dscale, void *dbias,
                                      double epsilon, const void *mean, const void *variance, void *activation, void *work,
                                      size_t work_bytes, void *reserve, size_t reserve_bytes) {
  const char *call = "cudnnBatchNormalizationBackwardEx";
  used(call, "x", xd, x);
  used(call, "dy", dyd, dy);
  used(call, "dx", dxd, dx);
  used(call, "the scale", sd, scale);
  used(call, "the scale's gradient", sd, dscale);
  used(call, "the bias's gradient", sd, dbias);
  used_if_given(call, "the saved mean", sd, mean);
  used_if_given(call, "the saved variance", sd, variance);
  on_device(call, "the workspace", work, work_bytes, current_device());
  on_device(call, "the reserve", reserve, reserve_bytes, current_device());
  return SUCCESS;
}

/* ---- recurrent layers: all matrices, then all biases, layer by layer and gate by gate ---- */
typedef struct { int cell, biases, directions, type, input, hidden, projected, layers; } recurrent;
int cudnnCreateRNNDescriptor(recurrent **r) { *r = calloc(1, sizeof **r); return SUCCESS; }
int cudnnDestroyRNNDescriptor(recurrent *r) { free(r); return SUCCESS; }
int cudnnSetRNNDescriptor_v8(recurrent *r, int algorithm, int cell, int biases, int direction, int mode, int type, int precision, int math,
                             int input, int hidden, int projected, int layers, void *dropout, uint32_t flags) {
  *r = (recurrent){cell, biases != CUDNN_RNN_NO_BIAS, direction == CUDNN_BIDIRECTIONAL ? 2 : 1, type, input, hidden, projected, layers};
  return SUCCESS;
}
static int gates(const recurrent *r) { return r->cell == CUDNN_LSTM ? 4 : r->cell == CUDNN_GRU ? 3 : 1; }
static int matrices(const recurrent *r) { return 2 * gates(r) + (r->projected != r->hidden); }
static void shape_of(const recurrent *r, int layer, int which, int *rows, int *cols) {
  int out = r->projected;
  *rows = which == 2 * gates(r) ? out : r->hidden;
  *cols = which == 2 * gates(r) ? r->hidden : which >= gates(r) ? out : layer < r->directions ? r->input : out * r->directions;
}
/* Elements before a matrix; before all biases, with the first layer and matrix that there are not. */
static size_t offset_of(const recurrent *r, int layer, int which) {
  size_t total = 0;
  for (int l = 0; l <= layer && l < r->layers * r->directions; l++)
    for (int w = 0; w < (l == layer ? which : matrices(r)); w++) {
      int rows, cols;
      shape_of(r, l, w, &rows, &cols);
      total += (size_t)rows * cols;
    }
  return total;
}
static size_t bias_elements(const recurrent *r) { return r->biases ? 2 * (size_t)gates(r) * r->hidden : 0; }
int cudnnGetRNNWeightSpaceSize(void *h, recurrent *r, size_t *n) {
  int all = r->layers * r->directions;
  *n = width(r->type) * (offset_of(r, all, 0) + all * bias_elements(r));
  return SUCCESS;
}
int cudnnGetRNNWeightParams(void *h, recurrent *r, int layer, size_t bytes, const void *space, int which, tensor *md, void **m, tensor *bd,
                            void **b) {
  int rows, cols;
  shape_of(r, layer, which, &rows, &cols);
  if (md) cudnnSetTensorNdDescriptor(md, r->type, 3, (int[]){1, rows, cols}, (int[]){rows * cols, cols, 1});
  if (m) *m = (char *)space + width(r->type) * offset_of(r, layer, which);
  if (bd) cudnnSetTensorNdDescriptor(bd, r->type, 3, (int[]){1, r->hidden, 1}, (int[]){r->hidden, 1, 1});
  size_t before = offset_of(r, r->layers * r->directions, 0) + layer * bias_elements(r) + (size_t)which * r->hidden;
  if (b) *b = r->biases && which < 2 * gates(r) ? (char *)space + width(r->type) * before : NULL;
  return SUCCESS;
}
int cudnnGetRNNTempSpaceSizes(void *h, void *r, int mode, void *x, size_t *work, size_t *reserve) {
  if (work) *work = WORKSPACE;
  if (reserve) *reserve = WORKSPACE;
  return SUCCESS;
}
int cudnnRNNForward(void *h, recurrent *r, int mode, const int *lengths, void *xd, const void *x, void *yd, void *y, tensor *hd,
                    const void *hx, void *hy, tensor *cd, const void *cx, void *cy, size_t weight_bytes, const void *weights,
                    size_t work_bytes, void *work, size_t reserve_bytes, void *reserve) {
  const char *call = "cudnnRNNForward";
  on_device(call, "x", x, 1, current_device());
  on_device(call, "y", y, 1, current_device());
  used_if_given(call, "hx", hd, hx);
  used_if_given(call, "hy", hd, hy);
  used_if_given(call, "cx", cd, cx);
  used_if_given(call, "cy", cd, cy);
  on_device(call, "the weights", weights, weight_bytes, current_device());
  on_device(call, "the workspace", work, work_bytes, current_device());
  return SUCCESS;
}
int cudnnDropoutGetStatesSize(void *h, size_t *n) { *n = WORKSPACE; return SUCCESS; }
