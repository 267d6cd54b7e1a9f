/* What the parts of the simulated CANN runtime share. */
#ifndef NPU_SIM_H
#define NPU_SIM_H

#include <stddef.h>
#include <stdint.h>

/* Results of acl functions (acl/error_codes/rt_error_codes.h). */
enum { ACL_OK = 0, ACL_PARAM_INVALID = 107000, ACL_NO_MEMORY = 207001, ACL_SYNC_TIMEOUT = 507046, ACL_TASK_FAILED = 507899 };

/* A piece of a stream's work: 0, or the error that every later synchronisation of the stream returns. It frees `task`. */
typedef int (*Work)(void *task);

/* Have the stream's own thread do this after all that was given to the stream before. NULL is the default stream. */
void sim_enqueue(void *stream, Work work, void *task);

/* The number of the device that owns all of these bytes; -1 if they are not one device's memory. */
int sim_device_of(const void *start, size_t bytes);

/* The device that the calling thread has set. */
int sim_current_device(void);

/* Say on standard error what was wrong. Returns `error`. */
int sim_refuse(int error, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
