/* Run a command whose calls to the files below a directory wait, and count these calls.

    delayed_calls DIRECTORY DELAY_MS REPORT COMMAND...

The kernel stops each call of the table below and asks this process before it goes on (seccomp's
user notification): whichever library makes the call, in whichever form, from any thread or child.
Calls elsewhere go on at once. Waiting calls form a queue as in slow_files.c. At the end REPORT has a
line `NAME COUNT` for each call, and the most that waited at once as `at-once COUNT`. Ends as the
command does.
*/

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PATH_BYTES 4096

/* How a call names files: by a path, by a directory and a path, or by a descriptor. */
enum form { PATH, TWO_PATHS, AT, TWO_AT, FD, TWO_FDS };

static struct call {
    int number;
    const char *name;
    enum form form;
    uint64_t count;
} calls[] = {
#define CALL(name, form) {SYS_##name, #name, form, 0}
    CALL(open, PATH), CALL(openat, AT), CALL(openat2, AT), CALL(creat, PATH),
    CALL(stat, PATH), CALL(lstat, PATH), CALL(fstat, FD), CALL(newfstatat, AT), CALL(statx, AT),
    CALL(access, PATH), CALL(faccessat, AT), CALL(faccessat2, AT), CALL(readlink, PATH),
    CALL(readlinkat, AT), CALL(statfs, PATH), CALL(fstatfs, FD),
    CALL(getdents, FD), CALL(getdents64, FD),
    CALL(read, FD), CALL(readv, FD), CALL(pread64, FD), CALL(preadv, FD), CALL(preadv2, FD),
    CALL(write, FD), CALL(writev, FD), CALL(pwrite64, FD), CALL(pwritev, FD), CALL(pwritev2, FD),
    CALL(copy_file_range, TWO_FDS), CALL(sendfile, TWO_FDS),
    CALL(rename, TWO_PATHS), CALL(renameat, TWO_AT), CALL(renameat2, TWO_AT),
    CALL(link, TWO_PATHS), CALL(linkat, TWO_AT), CALL(unlink, PATH), CALL(unlinkat, AT),
    CALL(mkdir, PATH), CALL(mkdirat, AT), CALL(rmdir, PATH),
    CALL(utimensat, AT), CALL(chmod, PATH), CALL(fchmod, FD), CALL(fchmodat, AT),
    CALL(chown, PATH), CALL(fchown, FD), CALL(fchownat, AT), CALL(truncate, PATH),
    CALL(ftruncate, FD), CALL(fallocate, FD),
    CALL(fsync, FD), CALL(fdatasync, FD), CALL(syncfs, FD),
};
#define CALLS (sizeof calls / sizeof *calls)

struct waiting {
    struct waiting *next;
    uint64_t id;
    int64_t due_ns;
};

static const char *directory;
static size_t directory_length;
static int64_t delay_ns;
static int listener;

static struct waiting *first, **last = &first;
static uint64_t waiting, most_waiting;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t queued = PTHREAD_COND_INITIALIZER;

/* Which calls */

static int is_below(const char *path) {
    return !strncmp(path, directory, directory_length)
        && (path[directory_length] == '/' || !path[directory_length]);
}

static int is_fd_below(pid_t pid, int fd) {
    char link[64], path[PATH_BYTES];
    snprintf(link, sizeof link, fd == AT_FDCWD ? "/proc/%d/cwd" : "/proc/%d/fd/%d", pid, fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static int is_path_below(pid_t pid, int fd, uint64_t address) {
    char path[PATH_BYTES] = "";
    size_t to_page_end = 4096 - address % 4096; /* a path may end just before unmapped memory */
    struct iovec here[1] = {{path, sizeof path - 1}};
    struct iovec there[2] = {{(void *)(uintptr_t)address, to_page_end},
                             {(void *)(uintptr_t)(address + to_page_end), 4096}};
    if (address && process_vm_readv(pid, here, 1, there, 2, 0) < 0) return 0;
    if (sscanf(path, "/proc/self/fd/%d/", &fd) == 1) return is_fd_below(pid, fd);
    return path[0] == '/' ? is_below(path) : is_fd_below(pid, fd);
}

static struct call *delayed_call(const struct seccomp_notif *asked) {
    const uint64_t *words = (const uint64_t *)asked->data.args;
    pid_t pid = asked->pid;
    struct call *call = calls;
    while (call->number != asked->data.nr) call++;
    int below = 0;
    switch (call->form) {
    case TWO_PATHS:
        below = is_path_below(pid, AT_FDCWD, words[1]); /* fall through */
    case PATH:
        below |= is_path_below(pid, AT_FDCWD, words[0]);
        break;
    case TWO_AT:
        below = is_path_below(pid, words[2], words[3]); /* fall through */
    case AT:
        below |= is_path_below(pid, words[0], words[1]);
        break;
    case TWO_FDS:
        below = is_fd_below(pid, call->number == SYS_sendfile ? words[1] : words[2]);
        /* fall through */
    case FD:
        below |= is_fd_below(pid, words[0]);
    }
    return below ? call : NULL;
}

/* Answers */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void go_on(uint64_t id) {
    struct seccomp_notif_resp answer = {.id = id, .flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE};
    ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer); /* fails if the caller has been killed */
}

static void put_in_queue(struct call *call, uint64_t id) {
    struct waiting *one = malloc(sizeof *one);
    *one = (struct waiting){NULL, id, now_ns() + delay_ns};
    pthread_mutex_lock(&lock);
    call->count++;
    if (++waiting > most_waiting) most_waiting = waiting;
    *last = one;
    last = &one->next;
    pthread_cond_signal(&queued);
    pthread_mutex_unlock(&lock);
}

static void *answer_when_due(void *unused) {
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!first) pthread_cond_wait(&queued, &lock);
        struct waiting *one = first;
        if (!(first = one->next)) last = &first;
        pthread_mutex_unlock(&lock);
        struct timespec due = {one->due_ns / 1000000000ll, one->due_ns % 1000000000ll};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
        pthread_mutex_lock(&lock);
        waiting--;
        pthread_mutex_unlock(&lock);
        go_on(one->id);
        free(one);
    }
    return unused;
}

static void *ask(void *unused) {
    struct pollfd ready = {.fd = listener, .events = POLLIN};
    while (poll(&ready, 1, -1) >= 0 && !(ready.revents & POLLHUP)) {
        struct seccomp_notif asked = {0};
        if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &asked)) continue; /* killed meanwhile */
        struct call *call = delayed_call(&asked);
        if (call) put_in_queue(call, asked.id);
        else go_on(asked.id);
    }
    return unused;
}

/* The command */

static int stop_calls(void) {
    struct sock_filter steps[CALLS + 6];
    size_t used = 0;
#define STEP(...) steps[used++] = (struct sock_filter)__VA_ARGS__
    STEP(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)));
    STEP(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0));
    STEP(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    STEP(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)));
    for (size_t i = 0; i < CALLS; i++)
        STEP(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i].number, CALLS - i, 0));
    STEP(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    STEP(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF));
    struct sock_fprog program = {used, steps};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER,
                   &program);
}

int main(int argc, char **argv) {
    if (argc < 5) {
        fprintf(stderr, "usage: delayed_calls DIRECTORY DELAY_MS REPORT COMMAND...\n");
        return 2;
    }
    directory = argv[1];
    directory_length = strlen(directory);
    delay_ns = atof(argv[2]) * 1e6;
    prctl(PR_SET_TIMERSLACK, 1);
    atomic_int *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pid = fork();
    if (!pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int here = stop_calls();
        *shared = here < 0 ? -errno : here;
        while (*shared) usleep(100); /* until the parent has its own descriptor */
        execvp(argv[4], argv + 4);
        _exit(127);
    }
    while (!*shared) usleep(100);
    if (*shared < 0) {
        fprintf(stderr, "delayed_calls: seccomp: %s\n", strerror(-*shared));
        kill(pid, SIGKILL);
        return 126;
    }
    listener = syscall(SYS_pidfd_getfd, syscall(SYS_pidfd_open, pid, 0), *shared, 0);
    if (listener < 0) {
        perror("delayed_calls: pidfd_getfd");
        kill(pid, SIGKILL);
        return 126;
    }
    *shared = 0;
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, answer_when_due, NULL);
    pthread_create(&threads[1], NULL, ask, NULL);
    int status;
    waitpid(pid, &status, 0);
    FILE *report = fopen(argv[3], "w");
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < CALLS; i++)
        if (calls[i].count) fprintf(report, "%s %lu\n", calls[i].name, calls[i].count);
    fprintf(report, "at-once %lu\n", most_waiting);
    fclose(report);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
