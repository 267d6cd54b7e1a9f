/* HCCL's part (libhccl): communicators whose messages are files in a folder of their own.
 *
 * Everything is made of messages between two ranks. A message is written under another name and renamed, so
 * whoever sees it sees all of it; the receiver removes it. Operations run on the stream that they are given, and
 * like HCCL they take memory of the communicator's own device only.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

enum { HCCL_OK = 0, HCCL_PARA = 1, HCCL_NOT_SUPPORT = 5, HCCL_SYSCALL = 8 }; /* HcclResult */
enum { SUM, PRODUCT, MAXIMUM, MINIMUM };                                   /* HcclReduceOp */
enum { INT8, INT16, INT32, FP16, FP32, INT64, UINT64, UINT8, UINT16, UINT32, FP64, BFP16, INT128, UNUSED, HIF8, FP8E4M3, FP8E5M2, FP8E8M0, TYPES };
static const size_t SIZES[TYPES] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16, 0, 1, 1, 1, 1};

#define ROOT_INFO_BYTES 4108
#define PATH_BYTES 256
#define PATIENCE_S 150 /* A lost peer: longer than any test waits. */

typedef struct {
    char folder[PATH_BYTES];
    uint32_t ranks, rank;
    int device;
    uint64_t *sent, *received; /* messages per peer, in the order in which operations were called */
    pthread_mutex_t lock;
} Comm;

typedef struct { int receives; uint32_t peer; char *at; size_t bytes; uint64_t number; } Message;

/* One operation: all messages out, all messages in, then perhaps a reduction of what came. */
typedef struct {
    Comm *comm;
    uint32_t count;
    char *parts, *result; /* for a reduction: one part per rank, in memory of our own; where the result goes */
    uint64_t elements;
    int type, reduction;
    Message messages[];
} Operation;

/* -- messages ---------------------------------------------------------------------------------------- */

static void name_of(char *path, const Comm *comm, uint32_t from, uint32_t to, uint64_t number) {
    snprintf(path, PATH_BYTES + 64, "%s/%u-%u-%llu", comm->folder, from, to, (unsigned long long)number);
}

static int put(const Comm *comm, const Message *message) {
    char path[PATH_BYTES + 64], draft[PATH_BYTES + 72];
    name_of(path, comm, comm->rank, message->peer, message->number);
    snprintf(draft, sizeof draft, "%s.part", path);
    int file = open(draft, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (file < 0) return sim_refuse(ACL_TASK_FAILED, "%s: %s", draft, strerror(errno));
    for (size_t done = 0; done < message->bytes;) {
        ssize_t more = write(file, message->at + done, message->bytes - done);
        if (more <= 0) return sim_refuse(ACL_TASK_FAILED, "%s: %s", draft, strerror(errno));
        done += (size_t)more;
    }
    close(file);
    return rename(draft, path) ? sim_refuse(ACL_TASK_FAILED, "%s: %s", path, strerror(errno)) : ACL_OK;
}

static int get(const Comm *comm, const Message *message) {
    char path[PATH_BYTES + 64];
    name_of(path, comm, message->peer, comm->rank, message->number);
    int file;
    time_t start = time(NULL);
    for (useconds_t pause = 20; (file = open(path, O_RDONLY)) < 0; pause = pause < 1000 ? pause * 2 : pause) {
        if (time(NULL) - start > PATIENCE_S)
            return sim_refuse(ACL_TASK_FAILED, "rank %u waited in vain for rank %u", comm->rank, message->peer);
        usleep(pause);
    }
    struct stat found;
    fstat(file, &found);
    if ((size_t)found.st_size != message->bytes)
        return sim_refuse(ACL_TASK_FAILED, "rank %u sent %lld bytes, rank %u expects %zu", message->peer,
                          (long long)found.st_size, comm->rank, message->bytes);
    for (size_t done = 0; done < message->bytes;) {
        ssize_t more = read(file, message->at + done, message->bytes - done);
        if (more <= 0) return sim_refuse(ACL_TASK_FAILED, "%s: %s", path, strerror(errno));
        done += (size_t)more;
    }
    close(file);
    unlink(path);
    return ACL_OK;
}

/* -- reductions -------------------------------------------------------------------------------------- */

#define REDUCE(NAME, TYPE)                                                             \
    static void NAME(TYPE *a, const TYPE *b, uint64_t n, int how) {                    \
        for (uint64_t i = 0; i < n; i++)                                               \
            a[i] = how == SUM       ? (TYPE)(a[i] + b[i])                              \
                   : how == PRODUCT ? (TYPE)(a[i] * b[i])                              \
                   : how == MAXIMUM ? (a[i] > b[i] ? a[i] : b[i])                      \
                                    : (a[i] < b[i] ? a[i] : b[i]);                     \
    }
REDUCE(reduce_int8, int8_t)
REDUCE(reduce_int16, int16_t)
REDUCE(reduce_int32, int32_t)
REDUCE(reduce_int64, int64_t)
REDUCE(reduce_float, float)

static int can_reduce(int type) { return type == INT8 || type == INT16 || type == INT32 || type == INT64 || type == FP32; }

static void reduce(void *a, const void *b, uint64_t n, int type, int how) {
    switch (type) {
        case INT8: reduce_int8(a, b, n, how); break;
        case INT16: reduce_int16(a, b, n, how); break;
        case INT32: reduce_int32(a, b, n, how); break;
        case INT64: reduce_int64(a, b, n, how); break;
        default: reduce_float(a, b, n, how);
    }
}

/* -- operations -------------------------------------------------------------------------------------- */

static int perform(void *task) {
    Operation *one = task;
    int error = ACL_OK;
    for (uint32_t i = 0; i < one->count && !error; i++)
        if (!one->messages[i].receives) error = put(one->comm, &one->messages[i]);
    for (uint32_t i = 0; i < one->count && !error; i++)
        if (one->messages[i].receives) error = get(one->comm, &one->messages[i]);
    if (one->parts && !error) {
        size_t bytes = one->elements * SIZES[one->type];
        for (uint32_t rank = 1; rank < one->comm->ranks; rank++)
            reduce(one->parts, one->parts + rank * bytes, one->elements, one->type, one->reduction);
        if (one->result) memcpy(one->result, one->parts, bytes);
    }
    free(one->parts);
    free(one);
    return error;
}

static Operation *operation(Comm *comm, uint32_t messages) {
    Operation *made = calloc(1, sizeof *made + messages * sizeof(Message));
    made->comm = comm;
    return made;
}

static void add(Operation *one, int receives, uint32_t peer, const void *at, size_t bytes) {
    Comm *comm = one->comm;
    pthread_mutex_lock(&comm->lock);
    uint64_t number = (receives ? comm->received : comm->sent)[peer]++;
    pthread_mutex_unlock(&comm->lock);
    one->messages[one->count++] = (Message){receives, peer, (char *)at, bytes, number};
}

static int start(Operation *one, void *stream) {
    sim_enqueue(stream, perform, one);
    return HCCL_OK;
}

static int check(const Comm *comm, const char *what, const void *at, uint64_t count, int type) {
    if (type < 0 || type >= TYPES || !SIZES[type]) return sim_refuse(HCCL_PARA, "%s: unknown data type %d", what, type);
    size_t bytes = count * SIZES[type];
    int device = bytes ? sim_device_of(at, bytes) : comm->device;
    if (device == comm->device) return HCCL_OK;
    if (device < 0) return sim_refuse(HCCL_PARA, "%s: %zu bytes at %p are not a device's memory", what, bytes, at);
    return sim_refuse(HCCL_PARA, "%s: memory of device %d on a communicator of device %d", what, device, comm->device);
}

static int check_reduction(const char *what, int type, int how) {
    if (can_reduce(type) && how >= SUM && how <= MINIMUM) return HCCL_OK;
    return sim_refuse(HCCL_NOT_SUPPORT, "%s of data type %d with operation %d", what, type, how);
}

#define CHECK(RESULT) do { int result_ = (RESULT); if (result_) return result_; } while (0)

int HcclSend(void *from, uint64_t count, int type, uint32_t to, Comm *comm, void *stream) {
    CHECK(check(comm, "HcclSend", from, count, type));
    Operation *one = operation(comm, 1);
    add(one, 0, to, from, count * SIZES[type]);
    return start(one, stream);
}

int HcclRecv(void *to, uint64_t count, int type, uint32_t from, Comm *comm, void *stream) {
    CHECK(check(comm, "HcclRecv", to, count, type));
    Operation *one = operation(comm, 1);
    add(one, 1, from, to, count * SIZES[type]);
    return start(one, stream);
}

typedef struct { int kind; void *at; uint64_t count; int type; uint32_t peer; } Item; /* HcclSendRecvItem; kind 0: send */

int HcclBatchSendRecv(Item *items, uint32_t count, Comm *comm, void *stream) {
    for (uint32_t i = 0; i < count; i++)
        CHECK(check(comm, "HcclBatchSendRecv", items[i].at, items[i].count, items[i].type));
    Operation *one = operation(comm, count);
    for (uint32_t i = 0; i < count; i++)
        add(one, items[i].kind != 0, items[i].peer, items[i].at, items[i].count * SIZES[items[i].type]);
    return start(one, stream);
}

int HcclBroadcast(void *at, uint64_t count, int type, uint32_t root, Comm *comm, void *stream) {
    CHECK(check(comm, "HcclBroadcast", at, count, type));
    Operation *one = operation(comm, comm->ranks);
    size_t bytes = count * SIZES[type];
    if (comm->rank != root) add(one, 1, root, at, bytes);
    else
        for (uint32_t rank = 0; rank < comm->ranks; rank++)
            if (rank != root) add(one, 0, rank, at, bytes);
    return start(one, stream);
}

int HcclScatter(void *from, void *to, uint64_t count, int type, uint32_t root, Comm *comm, void *stream) {
    CHECK(check(comm, "HcclScatter", to, count, type));
    if (comm->rank == root) CHECK(check(comm, "HcclScatter", from, count * comm->ranks, type));
    Operation *one = operation(comm, comm->ranks + 1);
    size_t bytes = count * SIZES[type];
    for (uint32_t rank = 0; comm->rank == root && rank < comm->ranks; rank++)
        add(one, 0, rank, (char *)from + rank * bytes, bytes);
    add(one, 1, root, to, bytes);
    return start(one, stream);
}

static void exchange_all(Operation *one, const char *from, size_t step, char *to, size_t bytes) {
    for (uint32_t rank = 0; rank < one->comm->ranks; rank++) {
        add(one, 0, rank, from + rank * step, bytes);
        add(one, 1, rank, to + rank * bytes, bytes);
    }
}

int HcclAllGather(void *from, void *to, uint64_t count, int type, Comm *comm, void *stream) {
    CHECK(check(comm, "HcclAllGather", from, count, type));
    CHECK(check(comm, "HcclAllGather", to, count * comm->ranks, type));
    Operation *one = operation(comm, 2 * comm->ranks);
    exchange_all(one, from, 0, to, count * SIZES[type]);
    return start(one, stream);
}

int HcclAlltoAll(const void *from, uint64_t sent, int sent_type, const void *to, uint64_t received, int received_type,
                 Comm *comm, void *stream) {
    CHECK(check(comm, "HcclAlltoAll", from, sent * comm->ranks, sent_type));
    CHECK(check(comm, "HcclAlltoAll", to, received * comm->ranks, received_type));
    Operation *one = operation(comm, 2 * comm->ranks);
    exchange_all(one, from, sent * SIZES[sent_type], (char *)to, received * SIZES[received_type]);
    return start(one, stream);
}

int HcclAlltoAllV(const void *from, const uint64_t *sent, const uint64_t *sent_at, int sent_type, const void *to,
                  const uint64_t *received, const uint64_t *received_at, int received_type, Comm *comm, void *stream) {
    Operation *one = operation(comm, 2 * comm->ranks);
    for (uint32_t rank = 0; rank < comm->ranks; rank++) {
        const char *source = (const char *)from + sent_at[rank] * SIZES[sent_type];
        const char *target = (const char *)to + received_at[rank] * SIZES[received_type];
        CHECK(check(comm, "HcclAlltoAllV", source, sent[rank], sent_type));
        CHECK(check(comm, "HcclAlltoAllV", target, received[rank], received_type));
        add(one, 0, rank, source, sent[rank] * SIZES[sent_type]);
        add(one, 1, rank, target, received[rank] * SIZES[received_type]);
    }
    return start(one, stream);
}

/* Parts of all ranks at this one, whose own lies `step` bytes further per rank in everyone's `from`. */
static int reducing(void *from, size_t step, void *to, uint64_t count, int type, int how, Comm *comm, void *stream) {
    Operation *one = operation(comm, 2 * comm->ranks);
    one->parts = malloc(count * SIZES[type] * comm->ranks + 1);
    one->result = to;
    one->elements = count;
    one->type = type;
    one->reduction = how;
    exchange_all(one, from, step, one->parts, count * SIZES[type]);
    return start(one, stream);
}

int HcclAllReduce(void *from, void *to, uint64_t count, int type, int how, Comm *comm, void *stream) {
    CHECK(check_reduction("HcclAllReduce", type, how));
    CHECK(check(comm, "HcclAllReduce", from, count, type));
    CHECK(check(comm, "HcclAllReduce", to, count, type));
    return reducing(from, 0, to, count, type, how, comm, stream);
}

int HcclReduce(void *from, void *to, uint64_t count, int type, int how, uint32_t root, Comm *comm, void *stream) {
    CHECK(check_reduction("HcclReduce", type, how));
    CHECK(check(comm, "HcclReduce", from, count, type));
    return reducing(from, 0, comm->rank == root ? to : NULL, count, type, how, comm, stream);
}

int HcclReduceScatter(void *from, void *to, uint64_t count, int type, int how, Comm *comm, void *stream) {
    CHECK(check_reduction("HcclReduceScatter", type, how));
    CHECK(check(comm, "HcclReduceScatter", from, count * comm->ranks, type));
    CHECK(check(comm, "HcclReduceScatter", to, count, type));
    return reducing(from, count * SIZES[type], to, count, type, how, comm, stream);
}

/* -- communicators ----------------------------------------------------------------------------------- */

/* The root's word that it hands to the other ranks: here the name of the folder of messages. */
int HcclGetRootInfo(void *info) {
    const char *base = getenv("NPU_SIM_FOLDER");
    memset(info, 0, ROOT_INFO_BYTES);
    snprintf(info, PATH_BYTES, "%s/hccl-XXXXXX", base ? base : "/tmp");
    return mkdtemp(info) ? HCCL_OK : sim_refuse(HCCL_SYSCALL, "%s: %s", (char *)info, strerror(errno));
}

int HcclCommInitRootInfo(uint32_t ranks, const void *info, uint32_t rank, void **made) {
    Comm *comm = calloc(1, sizeof *comm);
    snprintf(comm->folder, PATH_BYTES, "%s", (const char *)info);
    comm->ranks = ranks;
    comm->rank = rank;
    comm->device = sim_current_device();
    comm->sent = calloc(ranks, sizeof *comm->sent);
    comm->received = calloc(ranks, sizeof *comm->received);
    pthread_mutex_init(&comm->lock, NULL);
    *made = comm;
    return HCCL_OK;
}

int HcclCommInitRootInfoConfig(uint32_t ranks, const void *info, uint32_t rank, const void *config, void **comm) {
    (void)config;
    return HcclCommInitRootInfo(ranks, info, rank, comm);
}

int HcclCommDestroy(void *comm) { (void)comm; return HCCL_OK; } /* a stream may still be at work on it */
int HcclGetCommAsyncError(void *comm, int *error) { (void)comm; *error = HCCL_OK; return HCCL_OK; }
uint32_t HcclGetCommConfigCapability(void) { return 0; }
int HcclGetCommName(const Comm *comm, char *name) { snprintf(name, 128, "%s", strrchr(comm->folder, '/') + 1); return HCCL_OK; }
