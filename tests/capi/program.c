/* SPDX-License-Identifier: Apache-2.0 */
/* A C11 caller: routes 3 tokens, sends them through 2 ranks (threads of this program) and back, checks the numbers. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "waybill/waybill.h"

#define REQUIRE(call)                                                                   \
  do {                                                                                  \
    wb_status status_ = (call);                                                         \
    if (status_ != WB_OK) {                                                             \
      fprintf(stderr, "%s: %s: %s\n", #call, wb_status_name(status_), wb_last_error()); \
      return 1;                                                                         \
    }                                                                                   \
  } while (0)

static wb_tensor matrix(void* data, int32_t dtype, int64_t rows, int64_t columns) {
  wb_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = 2;
  tensor.shape[0] = rows;
  tensor.shape[1] = columns;
  return tensor;
}

enum { T = 3, K = 2, E = 4, H = 4, P = 2 };

/* Top 2 of 4 by softmax; the ids are those of the largest logits. */
static int route_tokens(int16_t ids[T * K], float weights[T * K], int32_t counts[E]) {
  float logits[T * E] = {4, 1, 3, 0, 0, 2, 1, 5, 1, 0, 4, 3};
  const int16_t expected[T * K] = {0, 2, 3, 1, 2, 3};
  wb_router_config config;
  REQUIRE(wb_router_config_init(&config, sizeof config));
  config.E = E;
  config.K = K;
  wb_router_inputs inputs;
  memset(&inputs, 0, sizeof inputs);
  inputs.struct_size = sizeof inputs;
  inputs.logits = matrix(logits, WB_F32, T, E);
  wb_router_outputs outputs;
  memset(&outputs, 0, sizeof outputs);
  outputs.struct_size = sizeof outputs;
  outputs.route.struct_size = sizeof outputs.route;
  outputs.route.T = T;
  outputs.route.K = K;
  outputs.route.E = E;
  outputs.route.id_dtype = WB_I16;
  outputs.route.ids = ids;
  outputs.route.weights = weights;
  outputs.route.counts = counts;
  REQUIRE(wb_router_forward(&config, &inputs, &outputs, NULL));
  REQUIRE(wb_route_validate(&outputs.route, 0));
  if (memcmp(ids, expected, sizeof expected) != 0) {
    fprintf(stderr, "wrong ids\n");
    return 1;
  }
  if (fabs(weights[0] - 1 / (1 + exp(-1.0))) > 1e-6) {
    fprintf(stderr, "wrong weight %g\n", weights[0]);
    return 1;
  }
  return 0;
}

struct rank_job {
  wb_fabric* fabric;
  int rank, failed;
};

/* Identity experts: out must be sum of the weights (1) times x. */
static int exchange_tokens(struct rank_job* job) {
  int16_t ids[T * K];
  float weights[T * K], x[T * H], out[T * H];
  int32_t counts[E];
  if (route_tokens(ids, weights, counts) != 0) return 1;
  for (int i = 0; i < T * H; ++i) x[i] = (float)(i + 100 * job->rank);
  wb_exchange_config config;
  REQUIRE(wb_exchange_config_init(&config, sizeof config));
  config.H = H;
  config.E = E;
  config.K = K;
  wb_route route;
  memset(&route, 0, sizeof route);
  route.struct_size = sizeof route;
  route.T = T;
  route.K = K;
  route.E = E;
  route.id_dtype = WB_I16;
  route.ids = ids;
  route.weights = weights;
  route.counts = counts;
  wb_exchange* exchange = NULL;
  wb_dispatch* dispatch = NULL;
  REQUIRE(wb_exchange_create(&config, job->fabric, &exchange));
  REQUIRE(wb_exchange_plan(exchange, &route, &dispatch));
  wb_dispatch_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  REQUIRE(wb_dispatch_get_info(dispatch, &info));
  if (info.R != 2 * T - 2 * (job->rank == 0) || info.S < info.R) {
    fprintf(stderr, "rank %d: R = %lld, S = %lld\n", job->rank, (long long)info.R, (long long)info.S);
    return 1;
  }
  float y[2 * T * K * H], z[2 * T * H];
  wb_tensor x_tensor = matrix(x, WB_F32, T, H), out_tensor = matrix(out, WB_F32, T, H), rows;
  wb_tensor y_tensor = matrix(y, WB_F32, info.S_padded, H), z_tensor = matrix(z, WB_F32, info.R, H);
  REQUIRE(wb_exchange_dispatch(exchange, dispatch, &x_tensor, &rows));
  REQUIRE(wb_permute(dispatch, &rows, &y_tensor, NULL));
  REQUIRE(wb_unpermute_reduce(dispatch, &y_tensor, 1, &z_tensor, NULL));
  REQUIRE(wb_exchange_combine(exchange, dispatch, &z_tensor, &out_tensor));
  for (int i = 0; i < T * H; ++i) {
    if (fabs(out[i] - x[i]) > 1e-4) {
      fprintf(stderr, "rank %d, element %d: %g is not %g\n", job->rank, i, out[i], x[i]);
      return 1;
    }
  }
  wb_dispatch_destroy(dispatch);
  wb_exchange_destroy(exchange);
  return 0;
}

static void* run_rank(void* argument) {
  struct rank_job* job = argument;
  job->failed = exchange_tokens(job);
  if (job->failed) wb_fabric_abort(job->fabric, "the C program's rank failed");
  return NULL;
}

int main(void) {
  REQUIRE(wb_check_version(WB_ABI_VERSION, WB_VERSION_STRING));
  printf("%s\n", wb_build_info());
  wb_group* group = NULL;
  REQUIRE(wb_group_create(P, 20000, 0, &group));
  pthread_t threads[P];
  struct rank_job jobs[P];
  for (int rank = 0; rank < P; ++rank) {
    jobs[rank].rank = rank;
    jobs[rank].failed = 1;
    REQUIRE(wb_group_fabric(group, rank, &jobs[rank].fabric));
    if (pthread_create(&threads[rank], NULL, run_rank, &jobs[rank]) != 0) return 1;
  }
  int failed = 0;
  for (int rank = 0; rank < P; ++rank) {
    pthread_join(threads[rank], NULL);
    failed += jobs[rank].failed;
  }
  wb_group_destroy(group);
  return failed;
}
