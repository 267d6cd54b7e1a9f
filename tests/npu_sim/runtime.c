/* The Ascend driver's part (libascendcl): devices, memory, streams, events, copies.
 *
 * Memory of a device is memory of this process, but it is kept apart: a copy whose kind does not fit its
 * addresses is refused. Each stream has a thread of its own, so what was not waited for is really not done.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

#define ALIGNMENT 512
#define MEMORY_BYTES (8ULL << 30)

enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE }; /* aclrtMemcpyKind */
enum { PINNED = -2, ORDINARY = -1 };                                      /* instead of a device's number */

static int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

int sim_refuse(int error, const char *format, ...) {
    va_list values;
    va_start(values, format);
    fprintf(stderr, "npu_sim: ");
    vfprintf(stderr, format, values);
    fprintf(stderr, "\n");
    va_end(values);
    return error;
}

/* -- devices ----------------------------------------------------------------------------------------- */

static _Thread_local int current = 0;

static int device_count(void) { return setting("NPU_SIM_DEVICES", 4); }

/* How late a copy behind the host's back is: a host that does not wait for it shall see the old bytes. */
static int copy_delay_us(void) { return setting("NPU_SIM_COPY_DELAY_US", 2000); }

int sim_current_device(void) { return current; }

int aclInit(const char *config) { (void)config; return ACL_OK; }
int aclFinalize(void) { return ACL_OK; }
int aclrtGetDeviceCount(uint32_t *count) { *count = (uint32_t)device_count(); return ACL_OK; }
int aclrtGetDevice(int32_t *device) { *device = current; return ACL_OK; }
int aclrtResetDevice(int32_t device) { (void)device; return ACL_OK; }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
const char *aclGetRecentErrMsg(void) { return "see what npu_sim wrote to standard error"; }

int aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= device_count())
        return sim_refuse(ACL_PARAM_INVALID, "there is no device %d, only %d", device, device_count());
    current = device;
    return ACL_OK;
}

int aclrtGetMemInfo(int kind, size_t *unused, size_t *all) { (void)kind; *unused = *all = MEMORY_BYTES; return ACL_OK; }

/* A context is one per device: its number plus one. */
int aclrtGetCurrentContext(void **context) { *context = (void *)(intptr_t)(current + 1); return ACL_OK; }
int aclrtSetCurrentContext(void *context) { return context ? aclrtSetDevice((int32_t)(intptr_t)context - 1) : ACL_OK; }
int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) { (void)device; *flags = 0; *active = 1; return ACL_OK; }

int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) { (void)device; (void)peer; *can = 1; return ACL_OK; }
int aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) { (void)peer; (void)flags; return ACL_OK; }
int aclGetDeviceCapability(uint32_t device, int attribute, int64_t *value) { (void)device; (void)attribute; *value = 0; return ACL_OK; }
int aclrtQueryDeviceStatus(int32_t device, int *status) { (void)device; *status = 0; return ACL_OK; }

/* Settings that change nothing here. */
int aclSetCompileopt(int option, const char *value) { (void)option; (void)value; return ACL_OK; }
int aclrtSetDeviceSatMode(int mode) { (void)mode; return ACL_OK; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { (void)seconds; return ACL_OK; }
int aclrtSetOpWaitTimeout(uint32_t seconds) { (void)seconds; return ACL_OK; }
int aclrtSetStreamFailureMode(void *stream, uint64_t mode) { (void)stream; (void)mode; return ACL_OK; }
int aclrtGetSysParamOpt(int option, int64_t *value) { (void)option; *value = 0; return ACL_OK; }
int aclrtSetSysParamOpt(int option, int64_t value) { (void)option; (void)value; return ACL_OK; }
int aclrtCtxGetSysParamOpt(int option, int64_t *value) { (void)option; *value = 0; return ACL_OK; }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { (void)option; (void)value; return ACL_OK; }

/* -- memory ------------------------------------------------------------------------------------------ */

typedef struct { const char *start; size_t bytes; int owner; } Block;

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static Block *blocks;
static size_t block_count, block_room;

static int allocate(void **start, size_t bytes, int owner) {
    if (!bytes) bytes = 1;
    if (posix_memalign(start, ALIGNMENT, bytes)) return ACL_NO_MEMORY;
    pthread_mutex_lock(&memory_lock);
    if (block_count == block_room) {
        block_room = block_room ? 2 * block_room : 64;
        blocks = realloc(blocks, block_room * sizeof *blocks);
    }
    blocks[block_count++] = (Block){*start, bytes, owner};
    pthread_mutex_unlock(&memory_lock);
    return ACL_OK;
}

static int release(void *start) {
    size_t i;
    pthread_mutex_lock(&memory_lock);
    for (i = 0; i < block_count && blocks[i].start != start; i++) {}
    int found = i < block_count;
    if (found) blocks[i] = blocks[--block_count];
    pthread_mutex_unlock(&memory_lock);
    if (!found) return sim_refuse(ACL_PARAM_INVALID, "%p was never allocated, or is freed twice", start);
    free(start);
    return ACL_OK;
}

/* Whose bytes these are; ORDINARY also where they reach over a block's end. */
static int owner_of(const void *start, size_t bytes) {
    const char *first = start;
    int owner = ORDINARY;
    pthread_mutex_lock(&memory_lock);
    for (size_t i = 0; i < block_count; i++)
        if (first >= blocks[i].start && first + bytes <= blocks[i].start + blocks[i].bytes) owner = blocks[i].owner;
    pthread_mutex_unlock(&memory_lock);
    return owner;
}

int sim_device_of(const void *start, size_t bytes) {
    int owner = owner_of(start, bytes);
    return owner >= 0 ? owner : -1;
}

int aclrtMalloc(void **start, size_t bytes, int policy) { (void)policy; return allocate(start, bytes, current); }
int aclrtMallocAlign32(void **start, size_t bytes, int policy) { return aclrtMalloc(start, bytes, policy); }
int aclrtFree(void *start) { return release(start); }
int aclrtMallocHost(void **start, size_t bytes) { return allocate(start, bytes, PINNED); }
int aclrtFreeHost(void *start) { return release(start); }

/* -- streams ----------------------------------------------------------------------------------------- */

typedef struct Step { Work work; void *task; struct Step *next; } Step;

typedef struct Stream {
    int device, running, error;
    uint64_t given, done; /* steps so far */
    Step *first, **end;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct Stream *next;
} Stream;

static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static Stream *streams; /* Never freed: a task or an event may still name them. */

static Stream *new_stream(void) {
    Stream *stream = calloc(1, sizeof *stream);
    stream->device = current;
    stream->end = &stream->first;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_mutex_lock(&streams_lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&streams_lock);
    return stream;
}

static Stream *stream_of(void *handle) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static Stream *standard;
    if (handle) return handle;
    pthread_mutex_lock(&lock);
    if (!standard) standard = new_stream();
    pthread_mutex_unlock(&lock);
    return standard;
}

static void *serve(void *handle) {
    Stream *stream = handle;
    current = stream->device;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first) pthread_cond_wait(&stream->changed, &stream->lock);
        Step *step = stream->first;
        stream->first = step->next;
        if (!stream->first) stream->end = &stream->first;
        pthread_mutex_unlock(&stream->lock);
        int error = step->work(step->task);
        free(step);
        pthread_mutex_lock(&stream->lock);
        if (error) stream->error = error;
        stream->done++;
        pthread_cond_broadcast(&stream->changed);
    }
    return NULL;
}

void sim_enqueue(void *handle, Work work, void *task) {
    Stream *stream = stream_of(handle);
    Step *step = malloc(sizeof *step);
    *step = (Step){work, task, NULL};
    pthread_mutex_lock(&stream->lock);
    *stream->end = step;
    stream->end = &step->next;
    stream->given++;
    if (!stream->running) {
        pthread_t thread;
        stream->running = 1;
        pthread_create(&thread, NULL, serve, stream);
        pthread_detach(thread);
    }
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

/* Wait for the steps given so far, for `milliseconds` at most (-1: for ever). */
static int drain(Stream *stream, int milliseconds) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += milliseconds / 1000;
    until.tv_nsec += milliseconds % 1000 * 1000000L;
    if (until.tv_nsec >= 1000000000L) until.tv_sec++, until.tv_nsec -= 1000000000L;
    int late = 0;
    pthread_mutex_lock(&stream->lock);
    uint64_t goal = stream->given;
    while (stream->done < goal && !late) {
        if (milliseconds < 0) pthread_cond_wait(&stream->changed, &stream->lock);
        else late = pthread_cond_timedwait(&stream->changed, &stream->lock, &until);
    }
    int error = late ? ACL_SYNC_TIMEOUT : stream->error;
    pthread_mutex_unlock(&stream->lock);
    return error;
}

int aclrtCreateStream(void **stream) { *stream = new_stream(); return ACL_OK; }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
    (void)priority;
    (void)flag;
    return aclrtCreateStream(stream);
}
int aclrtDestroyStream(void *stream) { return drain(stream_of(stream), -1); }
int aclrtDestroyStreamForce(void *stream) { (void)stream; return ACL_OK; }
int aclrtStreamGetId(void *stream, int32_t *id) { *id = (int32_t)((intptr_t)stream_of(stream) >> 6); return ACL_OK; }
int aclrtSynchronizeStream(void *stream) { return drain(stream_of(stream), -1); }
int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t milliseconds) { return drain(stream_of(stream), milliseconds); }

int aclrtStreamQuery(void *handle, int *status) {
    Stream *stream = stream_of(handle);
    pthread_mutex_lock(&stream->lock);
    *status = stream->done < stream->given; /* 0: complete, 1: not ready */
    pthread_mutex_unlock(&stream->lock);
    return ACL_OK;
}

int aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) {
    int error = ACL_OK;
    pthread_mutex_lock(&streams_lock);
    Stream *stream = streams;
    pthread_mutex_unlock(&streams_lock);
    for (; stream; stream = stream->next)
        if (stream->device == current) {
            int found = drain(stream, milliseconds);
            if (found) error = found;
        }
    return error;
}
int aclrtSynchronizeDevice(void) { return aclrtSynchronizeDeviceWithTimeout(-1); }

/* -- events ------------------------------------------------------------------------------------------ */

typedef struct {
    uint64_t recorded, reached; /* how often the event was recorded, and the last record that its stream got to */
    struct timespec time;
} Event; /* never freed, as streams */

typedef struct { Event *event; uint64_t record; } Mark;

static pthread_mutex_t events_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t events_changed = PTHREAD_COND_INITIALIZER;

static Mark *mark(Event *event, int next) {
    Mark *made = malloc(sizeof *made);
    pthread_mutex_lock(&events_lock);
    event->recorded += (uint64_t)next;
    *made = (Mark){event, event->recorded};
    pthread_mutex_unlock(&events_lock);
    return made;
}

static int reach(void *task) {
    Mark *one = task;
    pthread_mutex_lock(&events_lock);
    if (one->event->reached < one->record) one->event->reached = one->record;
    clock_gettime(CLOCK_MONOTONIC, &one->event->time);
    pthread_cond_broadcast(&events_changed);
    pthread_mutex_unlock(&events_lock);
    free(one);
    return ACL_OK;
}

static int await(void *task) {
    Mark *one = task;
    pthread_mutex_lock(&events_lock);
    while (one->event->reached < one->record) pthread_cond_wait(&events_changed, &events_lock);
    pthread_mutex_unlock(&events_lock);
    free(one);
    return ACL_OK;
}

static int is_reached(const Event *event) {
    pthread_mutex_lock(&events_lock);
    int found = event->reached >= event->recorded;
    pthread_mutex_unlock(&events_lock);
    return found;
}

int aclrtCreateEvent(void **event) { *event = calloc(1, sizeof(Event)); return ACL_OK; }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { (void)flag; return aclrtCreateEvent(event); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { (void)flag; return aclrtCreateEvent(event); }
int aclrtDestroyEvent(void *event) { (void)event; return ACL_OK; }
int aclrtResetEvent(void *event, void *stream) { (void)event; (void)stream; return ACL_OK; }
int aclrtRecordEvent(void *event, void *stream) { sim_enqueue(stream, reach, mark(event, 1)); return ACL_OK; }
int aclrtStreamWaitEvent(void *stream, void *event) { sim_enqueue(stream, await, mark(event, 0)); return ACL_OK; }
int aclrtSynchronizeEvent(void *event) { return await(mark(event, 0)); }
int aclrtQueryEventStatus(void *event, int *status) { *status = is_reached(event); return ACL_OK; }      /* 1: complete */
int aclrtQueryEventWaitStatus(void *event, int *status) { *status = !is_reached(event); return ACL_OK; } /* 0: complete */

int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
    const struct timespec *a = &((Event *)start)->time, *b = &((Event *)end)->time;
    *milliseconds = (float)((double)(b->tv_sec - a->tv_sec) * 1e3 + (double)(b->tv_nsec - a->tv_nsec) / 1e6);
    return ACL_OK;
}

/* -- copies ------------------------------------------------------------------------------------------ */

typedef struct { void *to; const void *from; size_t bytes; int late; } Copy;
typedef struct { void *at; int value; size_t bytes; } Fill;

static int check_copy(const void *to, size_t room, const void *from, size_t bytes, int kind) {
    if (bytes > room) return sim_refuse(ACL_PARAM_INVALID, "a copy of %zu bytes into room for %zu", bytes, room);
    if (kind > DEVICE_TO_DEVICE) return sim_refuse(ACL_PARAM_INVALID, "a copy of the unknown kind %d", kind);
    int wants_to = kind == HOST_TO_DEVICE || kind == DEVICE_TO_DEVICE;
    int wants_from = kind == DEVICE_TO_HOST || kind == DEVICE_TO_DEVICE;
    if (bytes && (owner_of(to, bytes) >= 0) != wants_to)
        return sim_refuse(ACL_PARAM_INVALID, "a copy of kind %d to memory that is %s device's", kind, wants_to ? "no" : "a");
    if (bytes && (owner_of(from, bytes) >= 0) != wants_from)
        return sim_refuse(ACL_PARAM_INVALID, "a copy of kind %d from memory that is %s device's", kind, wants_from ? "no" : "a");
    return ACL_OK;
}

static int copy(void *task) {
    Copy *one = task;
    if (one->late) usleep((useconds_t)copy_delay_us());
    memcpy(one->to, one->from, one->bytes);
    free(one);
    return ACL_OK;
}

static int fill(void *task) {
    Fill *one = task;
    memset(one->at, one->value, one->bytes);
    free(one);
    return ACL_OK;
}

int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) {
    int error = check_copy(to, room, from, bytes, kind);
    if (!error) memcpy(to, from, bytes);
    return error;
}

int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
    int error = check_copy(to, room, from, bytes, kind);
    if (error) return error;
    /* Only pinned memory is copied behind the host's back. */
    int pageable = (kind == HOST_TO_DEVICE && owner_of(from, bytes) != PINNED) ||
                   (kind == DEVICE_TO_HOST && owner_of(to, bytes) != PINNED);
    Copy *one = malloc(sizeof *one);
    *one = (Copy){to, from, bytes, !pageable && kind != DEVICE_TO_DEVICE};
    sim_enqueue(stream, copy, one);
    return pageable ? aclrtSynchronizeStream(stream) : ACL_OK;
}

int aclrtMemset(void *at, size_t room, int32_t value, size_t bytes) {
    if (bytes > room) return sim_refuse(ACL_PARAM_INVALID, "%zu bytes to fill in room for %zu", bytes, room);
    memset(at, value, bytes);
    return ACL_OK;
}

int aclrtMemsetAsync(void *at, size_t room, int32_t value, size_t bytes, void *stream) {
    if (bytes > room) return sim_refuse(ACL_PARAM_INVALID, "%zu bytes to fill in room for %zu", bytes, room);
    Fill *one = malloc(sizeof *one);
    *one = (Fill){at, value, bytes};
    sim_enqueue(stream, fill, one);
    return ACL_OK;
}
