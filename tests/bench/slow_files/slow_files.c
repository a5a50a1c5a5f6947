/* A file system that shows a directory and waits before it answers each call.

    slow_files DIRECTORY MOUNT CONTROL ATTRIBUTE_SECONDS WITH_ATTRIBUTES WORKERS

Waits the same time before it does each request of the kernel, as a server of files does that is
some way off. Requests overlap, also in one directory, and nothing here holds a lock while it waits.
All requests wait alike, so they form a queue: receivers put requests into it with the time at which
they are due, and workers take them out, sleep until then, do them and answer. A mount with hundreds
of calls in flight needs only a few threads. Requests that nobody waits for are done at once.

libfuse 3.14 knows FUSE_CAP_PARALLEL_DIROPS but does not ask the kernel for it, which then does one
look-up a directory at a time. Its answer to INIT is changed on the way (`write_reply`), and so the
mount is made here, which needs root.

Files are known by handles, since a process may not have as many files open as a store has. Names
of other file systems below DIRECTORY are not served.

CONTROL: file of 64-bit numbers, mapped: see struct control.
ATTRIBUTE_SECONDS: time for which the kernel trusts attributes and names that it has seen.
WITH_ATTRIBUTES: 1 gives attributes with the entries of a directory, as NFS does with READDIRPLUS.
*/

#define _GNU_SOURCE
#define FUSE_USE_VERSION FUSE_MAKE_VERSION(3, 12)

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define RECEIVERS 2
#define OPERATIONS 64
#define BUCKETS (1 << 18)
#define LOCKS 256
#define KEEP_BUFFERS 1024
#define PATH_BYTES 32
#define HANDLE_BYTES 32

struct control {
    _Atomic uint64_t delay_ns;
    _Atomic uint64_t waiting; /* requests that wait now */
    _Atomic uint64_t most_waiting;
    _Atomic uint64_t calls[OPERATIONS]; /* by the numbers of linux/fuse.h */
};

struct handle {
    struct file_handle head;
    unsigned char bytes[HANDLE_BYTES];
};

struct inode {
    struct inode *next;
    int fd; /* directories only */
    struct handle handle;
    uint64_t lookups;
};

struct request {
    struct request *next;
    struct fuse_buf buffer;
    int64_t due_ns;
    int waits;
};

struct directory {
    DIR *entries;
    pthread_mutex_t lock;
};

static struct control *control;
static double attribute_seconds;
static int with_attributes;
static struct fuse_session *session;

static int mount_fd; /* of the directory, for handles */
static struct inode root;
static struct inode *buckets[BUCKETS];
static pthread_mutex_t locks[LOCKS];

static struct request *first, **last = &first, *spare;
static int spares, ended;
static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t queued = PTHREAD_COND_INITIALIZER;

/* Inodes */

static struct inode *inode_of(fuse_ino_t number) {
    return number == FUSE_ROOT_ID ? &root : (struct inode *)(uintptr_t)number;
}

static int fd_of(fuse_ino_t number) { return inode_of(number)->fd; }

static int handle_of(int fd, struct handle *handle) {
    int mount;
    memset(handle, 0, sizeof *handle);
    handle->head.handle_bytes = HANDLE_BYTES;
    return name_to_handle_at(fd, "", &handle->head, &mount, AT_EMPTY_PATH);
}

static int open_inode(fuse_ino_t number, int flags) {
    return open_by_handle_at(mount_fd, &inode_of(number)->handle.head, flags | O_CLOEXEC);
}

static const char *path_of(int fd, char *path) {
    snprintf(path, PATH_BYTES, "/proc/self/fd/%d", fd);
    return path;
}

static size_t bucket_of(const struct handle *handle) {
    uint64_t hash = 0xCBF29CE484222325ull;
    const unsigned char *bytes = handle->head.f_handle;
    for (unsigned i = 0; i < handle->head.handle_bytes; i++)
        hash = (hash ^ bytes[i]) * 0x100000001B3ull;
    return (hash ^ hash >> 32) % BUCKETS;
}

static int same(const struct handle *one, const struct handle *other) {
    return !memcmp(one, other, sizeof *one);
}

/* Find an entry and count a look-up of it; return an error number. */
static int look_up(fuse_ino_t parent, const char *name, struct fuse_entry_param *entry) {
    memset(entry, 0, sizeof *entry);
    entry->attr_timeout = entry->entry_timeout = attribute_seconds;
    struct handle handle;
    int fd = openat(fd_of(parent), name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return errno;
    if (fstatat(fd, "", &entry->attr, AT_EMPTY_PATH) < 0 || handle_of(fd, &handle)) {
        int error = errno;
        close(fd);
        return error;
    }
    size_t bucket = bucket_of(&handle);
    pthread_mutex_t *lock = &locks[bucket % LOCKS];
    pthread_mutex_lock(lock);
    struct inode *inode = buckets[bucket];
    while (inode && !same(&inode->handle, &handle)) inode = inode->next;
    if (!inode) {
        inode = malloc(sizeof *inode);
        *inode = (struct inode){buckets[bucket], -1, handle, 0};
        if (S_ISDIR(entry->attr.st_mode)) inode->fd = fd, fd = -1;
        buckets[bucket] = inode;
    }
    inode->lookups++;
    pthread_mutex_unlock(lock);
    if (fd >= 0) close(fd);
    entry->ino = (uintptr_t)inode;
    return 0;
}

static void forget_inode(fuse_ino_t number, uint64_t lookups) {
    struct inode *inode = inode_of(number);
    if (inode == &root) return;
    size_t bucket = bucket_of(&inode->handle);
    pthread_mutex_t *lock = &locks[bucket % LOCKS];
    pthread_mutex_lock(lock);
    if (inode->lookups -= lookups) {
        inode = NULL;
    } else {
        struct inode **link = &buckets[bucket];
        while (*link != inode) link = &(*link)->next;
        *link = inode->next;
    }
    pthread_mutex_unlock(lock);
    if (inode && inode->fd >= 0) close(inode->fd);
    free(inode);
}

static void reply(fuse_req_t request, int failed) { fuse_reply_err(request, failed ? errno : 0); }

static void reply_entry(fuse_req_t request, fuse_ino_t parent, const char *name) {
    struct fuse_entry_param entry;
    int error = look_up(parent, name, &entry);
    if (error) fuse_reply_err(request, error);
    else fuse_reply_entry(request, &entry);
}

static void give_to_caller(fuse_req_t request, int parent, const char *name) {
    const struct fuse_ctx *caller = fuse_req_ctx(request);
    if (caller->uid != geteuid() || caller->gid != getegid())
        (void)!fchownat(parent, name, caller->uid, caller->gid, AT_SYMLINK_NOFOLLOW);
}

/* Operations */

static void init(void *unused, struct fuse_conn_info *connection) {
    (void)unused;
    connection->want |= connection->capable & (FUSE_CAP_PARALLEL_DIROPS | FUSE_CAP_ASYNC_READ);
    connection->want &= ~(FUSE_CAP_READDIRPLUS | FUSE_CAP_READDIRPLUS_AUTO | FUSE_CAP_SPLICE_READ
                          | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE);
    if (with_attributes) connection->want |= connection->capable & FUSE_CAP_READDIRPLUS;
    connection->max_background = connection->congestion_threshold = 1024;
    connection->time_gran = 1;
}

static void lookup(fuse_req_t request, fuse_ino_t parent, const char *name) {
    reply_entry(request, parent, name);
}

static void forget(fuse_req_t request, fuse_ino_t number, uint64_t lookups) {
    forget_inode(number, lookups);
    fuse_reply_none(request);
}

static void forget_multi(fuse_req_t request, size_t count, struct fuse_forget_data *forgets) {
    for (size_t i = 0; i < count; i++) forget_inode(forgets[i].ino, forgets[i].nlookup);
    fuse_reply_none(request);
}

static void getattr(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *file) {
    struct stat attributes;
    int fd = file ? (int)file->fh : open_inode(number, O_PATH);
    int failed = fd < 0 || fstatat(fd, "", &attributes, AT_EMPTY_PATH);
    if (!file && fd >= 0) close(fd);
    if (failed) reply(request, 1);
    else fuse_reply_attr(request, &attributes, attribute_seconds);
}

static int set_attributes(const char *path, int file, struct stat *wanted, int which) {
    if (which & FUSE_SET_ATTR_MODE)
        if (file < 0 ? chmod(path, wanted->st_mode) : fchmod(file, wanted->st_mode)) return -1;
    if (which & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID)) {
        uid_t uid = which & FUSE_SET_ATTR_UID ? wanted->st_uid : (uid_t)-1;
        gid_t gid = which & FUSE_SET_ATTR_GID ? wanted->st_gid : (gid_t)-1;
        if (file < 0 ? chown(path, uid, gid) : fchown(file, uid, gid)) return -1;
    }
    if (which & FUSE_SET_ATTR_SIZE)
        if (file < 0 ? truncate(path, wanted->st_size) : ftruncate(file, wanted->st_size))
            return -1;
    if (which & (FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_MTIME)) {
        struct timespec times[2] = {{0, UTIME_OMIT}, {0, UTIME_OMIT}};
        if (which & FUSE_SET_ATTR_ATIME_NOW) times[0].tv_nsec = UTIME_NOW;
        else if (which & FUSE_SET_ATTR_ATIME) times[0] = wanted->st_atim;
        if (which & FUSE_SET_ATTR_MTIME_NOW) times[1].tv_nsec = UTIME_NOW;
        else if (which & FUSE_SET_ATTR_MTIME) times[1] = wanted->st_mtim;
        if (file < 0 ? utimensat(AT_FDCWD, path, times, 0) : futimens(file, times)) return -1;
    }
    return 0;
}

static void setattr(fuse_req_t request, fuse_ino_t number, struct stat *wanted, int which,
                    struct fuse_file_info *file) {
    char path[PATH_BYTES];
    int fd = file ? (int)file->fh : open_inode(number, O_PATH);
    if (fd < 0 || set_attributes(path_of(fd, path), file ? fd : -1, wanted, which))
        reply(request, 1);
    else getattr(request, number, file);
    if (!file && fd >= 0) close(fd);
}

static void readlink_(fuse_req_t request, fuse_ino_t number) {
    char target[PATH_MAX + 1];
    int fd = open_inode(number, O_PATH | O_NOFOLLOW);
    ssize_t length = fd < 0 ? -1 : readlinkat(fd, "", target, sizeof target - 1);
    if (length < 0) {
        reply(request, 1);
    } else {
        target[length] = 0;
        fuse_reply_readlink(request, target);
    }
    if (fd >= 0) close(fd);
}

static void symlink_(fuse_req_t request, const char *target, fuse_ino_t parent, const char *name) {
    if (symlinkat(target, fd_of(parent), name)) {
        reply(request, 1);
    } else {
        give_to_caller(request, fd_of(parent), name);
        reply_entry(request, parent, name);
    }
}

static void mknod_(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode,
                   dev_t device) {
    if (mknodat(fd_of(parent), name, mode, device)) {
        reply(request, 1);
    } else {
        give_to_caller(request, fd_of(parent), name);
        reply_entry(request, parent, name);
    }
}

static void mkdir_(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode) {
    if (mkdirat(fd_of(parent), name, mode)) {
        reply(request, 1);
    } else {
        give_to_caller(request, fd_of(parent), name);
        reply_entry(request, parent, name);
    }
}

static void unlink_(fuse_req_t request, fuse_ino_t parent, const char *name) {
    reply(request, unlinkat(fd_of(parent), name, 0));
}

static void rmdir_(fuse_req_t request, fuse_ino_t parent, const char *name) {
    reply(request, unlinkat(fd_of(parent), name, AT_REMOVEDIR));
}

static void rename_(fuse_req_t request, fuse_ino_t parent, const char *name, fuse_ino_t new_parent,
                    const char *new_name, unsigned int flags) {
    reply(request, renameat2(fd_of(parent), name, fd_of(new_parent), new_name, flags));
}

static void link_(fuse_req_t request, fuse_ino_t number, fuse_ino_t parent, const char *name) {
    int fd = open_inode(number, O_PATH | O_NOFOLLOW);
    if (fd < 0 || linkat(fd, "", fd_of(parent), name, AT_EMPTY_PATH)) reply(request, 1);
    else reply_entry(request, parent, name);
    if (fd >= 0) close(fd);
}

static void open_(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *file) {
    int fd = open_inode(number, file->flags & ~(O_DIRECT | O_CREAT | O_EXCL));
    file->fh = fd;
    file->noflush = 1;
    if (fd < 0) reply(request, 1);
    else if (fuse_reply_open(request, file)) close(fd);
}

static void create(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode,
                   struct fuse_file_info *file) {
    int flags = (file->flags & ~O_DIRECT) | O_CREAT | O_CLOEXEC;
    int fd = openat(fd_of(parent), name, flags, mode);
    if (fd < 0) {
        reply(request, 1);
        return;
    }
    give_to_caller(request, fd_of(parent), name);
    struct fuse_entry_param entry;
    int error = look_up(parent, name, &entry);
    file->fh = fd;
    file->noflush = 1;
    if (error) fuse_reply_err(request, error);
    else if (!fuse_reply_create(request, &entry, file)) return;
    else forget_inode(entry.ino, 1);
    close(fd);
}

static void read_(fuse_req_t request, fuse_ino_t number, size_t size, off_t start,
                  struct fuse_file_info *file) {
    static __thread char *bytes;
    static __thread size_t room;
    (void)number;
    if (room < size) {
        free(bytes);
        bytes = malloc(room = size);
    }
    ssize_t done = pread(file->fh, bytes, size, start);
    if (done < 0) reply(request, 1);
    else fuse_reply_buf(request, bytes, done);
}

static void write_(fuse_req_t request, fuse_ino_t number, const char *bytes, size_t size,
                   off_t start, struct fuse_file_info *file) {
    (void)number;
    ssize_t done = pwrite(file->fh, bytes, size, start);
    if (done < 0) reply(request, 1);
    else fuse_reply_write(request, done);
}

static void copy_file_range_(fuse_req_t request, fuse_ino_t source, off_t source_start,
                             struct fuse_file_info *source_file, fuse_ino_t target,
                             off_t target_start, struct fuse_file_info *target_file, size_t size,
                             int flags) {
    (void)source, (void)target;
    ssize_t done = copy_file_range(source_file->fh, &source_start, target_file->fh, &target_start,
                                   size, flags);
    if (done < 0) reply(request, 1);
    else fuse_reply_write(request, done);
}

static void fallocate_(fuse_req_t request, fuse_ino_t number, int mode, off_t start, off_t size,
                       struct fuse_file_info *file) {
    (void)number;
    reply(request, fallocate(file->fh, mode, start, size));
}

static void lseek_(fuse_req_t request, fuse_ino_t number, off_t start, int whence,
                   struct fuse_file_info *file) {
    (void)number;
    off_t found = lseek(file->fh, start, whence);
    if (found < 0) reply(request, 1);
    else fuse_reply_lseek(request, found);
}

static void release(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *file) {
    (void)number;
    close(file->fh);
    fuse_reply_err(request, 0);
}

static void fsync_(fuse_req_t request, fuse_ino_t number, int data_only,
                   struct fuse_file_info *file) {
    (void)number;
    reply(request, data_only ? fdatasync(file->fh) : fsync(file->fh));
}

static struct directory *directory_of(struct fuse_file_info *file) {
    return (struct directory *)(uintptr_t)file->fh;
}

static void opendir_(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *file) {
    int fd = openat(fd_of(number), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct directory *directory = malloc(sizeof *directory);
    if (fd < 0 || !(directory->entries = fdopendir(fd))) {
        reply(request, 1);
        if (fd >= 0) close(fd);
        free(directory);
        return;
    }
    pthread_mutex_init(&directory->lock, NULL);
    file->fh = (uintptr_t)directory;
    if (fuse_reply_open(request, file)) {
        closedir(directory->entries);
        free(directory);
    }
}

static void read_directory(fuse_req_t request, fuse_ino_t number, size_t size, off_t start,
                           struct fuse_file_info *file, int plus) {
    struct directory *directory = directory_of(file);
    char *bytes = malloc(size);
    size_t used = 0;
    int error = 0;
    pthread_mutex_lock(&directory->lock);
    if (telldir(directory->entries) != start) seekdir(directory->entries, start);
    for (struct dirent *found; errno = 0, found = readdir(directory->entries);) {
        struct fuse_entry_param entry = {.attr = {.st_ino = found->d_ino,
                                                  .st_mode = (mode_t)found->d_type << 12}};
        int dots = !strcmp(found->d_name, ".") || !strcmp(found->d_name, "..");
        if (plus && !dots && look_up(number, found->d_name, &entry)) continue;
        size_t needed =
            plus ? fuse_add_direntry_plus(request, bytes + used, size - used, found->d_name, &entry,
                                          found->d_off)
                 : fuse_add_direntry(request, bytes + used, size - used, found->d_name, &entry.attr,
                                     found->d_off);
        if (needed > size - used) {
            if (entry.ino) forget_inode(entry.ino, 1);
            seekdir(directory->entries, start);
            break;
        }
        used += needed;
        start = found->d_off;
    }
    if (!used) error = errno;
    pthread_mutex_unlock(&directory->lock);
    if (error) fuse_reply_err(request, error);
    else fuse_reply_buf(request, bytes, used);
    free(bytes);
}

static void readdir_(fuse_req_t request, fuse_ino_t number, size_t size, off_t start,
                     struct fuse_file_info *file) {
    read_directory(request, number, size, start, file, 0);
}

static void readdirplus(fuse_req_t request, fuse_ino_t number, size_t size, off_t start,
                        struct fuse_file_info *file) {
    read_directory(request, number, size, start, file, 1);
}

static void releasedir(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *file) {
    (void)number;
    closedir(directory_of(file)->entries);
    free(directory_of(file));
    fuse_reply_err(request, 0);
}

static void fsyncdir(fuse_req_t request, fuse_ino_t number, int data_only,
                     struct fuse_file_info *file) {
    (void)number, (void)data_only;
    reply(request, fsync(dirfd(directory_of(file)->entries)));
}

static void statfs_(fuse_req_t request, fuse_ino_t number) {
    struct statvfs numbers;
    (void)number;
    if (fstatvfs(mount_fd, &numbers)) reply(request, 1);
    else fuse_reply_statfs(request, &numbers);
}

static const struct fuse_lowlevel_ops operations = {
    .init = init, .lookup = lookup, .forget = forget, .forget_multi = forget_multi,
    .getattr = getattr, .setattr = setattr, .readlink = readlink_, .symlink = symlink_,
    .mknod = mknod_, .mkdir = mkdir_, .unlink = unlink_, .rmdir = rmdir_, .rename = rename_,
    .link = link_, .open = open_, .create = create, .read = read_, .write = write_,
    .copy_file_range = copy_file_range_, .fallocate = fallocate_, .lseek = lseek_,
    .release = release, .fsync = fsync_, .opendir = opendir_, .readdir = readdir_,
    .readdirplus = readdirplus, .releasedir = releasedir, .fsyncdir = fsyncdir, .statfs = statfs_,
};

/* The kernel's device */

static ssize_t write_reply(int device, struct iovec *pieces, int count, void *unused) {
    static atomic_int initialised;
    (void)unused;
    if (count == 2 && !atomic_exchange(&initialised, 1))
        ((struct fuse_init_out *)pieces[1].iov_base)->flags |= FUSE_PARALLEL_DIROPS;
    return writev(device, pieces, count);
}

static ssize_t read_request(int device, void *bytes, size_t size, void *unused) {
    (void)unused;
    return read(device, bytes, size);
}

static const struct fuse_custom_io device_calls = {.writev = write_reply, .read = read_request};

/* Threads */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void sleep_until(int64_t due) {
    struct timespec when = {due / 1000000000ll, due % 1000000000ll};
    while (due > now_ns() && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL) == EINTR);
}

/* The kernel's callers do not wait for these, so they take no time of theirs. */
static int waits(uint32_t operation) {
    switch (operation) {
    case FUSE_INIT: case FUSE_DESTROY: case FUSE_FORGET: case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT: case FUSE_RELEASE: case FUSE_RELEASEDIR: case FUSE_FLUSH:
        return 0;
    default:
        return 1;
    }
}

static struct request *spare_request(void) {
    pthread_mutex_lock(&queue_lock);
    struct request *request = spare;
    if (request) spare = request->next, spares--;
    pthread_mutex_unlock(&queue_lock);
    return request ? request : calloc(1, sizeof *request);
}

static void answer(struct request *request) {
    if (request->waits) atomic_fetch_sub(&control->waiting, 1);
    fuse_session_process_buf(session, &request->buffer);
    pthread_mutex_lock(&queue_lock);
    int keep = spares < KEEP_BUFFERS;
    if (keep) request->next = spare, spare = request, spares++;
    pthread_mutex_unlock(&queue_lock);
    if (keep) return;
    free(request->buffer.mem);
    free(request);
}

static void count(uint32_t operation) {
    if (operation < OPERATIONS) atomic_fetch_add(&control->calls[operation], 1);
    if (!waits(operation)) return;
    uint64_t now = atomic_fetch_add(&control->waiting, 1) + 1;
    uint64_t most = atomic_load(&control->most_waiting);
    while (now > most && !atomic_compare_exchange_weak(&control->most_waiting, &most, now));
}

static void *receive(void *unused) {
    (void)unused;
    while (!fuse_session_exited(session)) {
        struct request *request = spare_request();
        int length = fuse_session_receive_buf(session, &request->buffer);
        if (length == -EINTR) continue;
        if (length <= 0) break;
        uint32_t operation = ((struct fuse_in_header *)request->buffer.mem)->opcode;
        int64_t delay = atomic_load(&control->delay_ns);
        request->waits = waits(operation);
        count(operation);
        if (!delay || !request->waits) {
            answer(request);
            continue;
        }
        request->due_ns = now_ns() + delay;
        request->next = NULL;
        pthread_mutex_lock(&queue_lock);
        *last = request;
        last = &request->next;
        pthread_cond_signal(&queued);
        pthread_mutex_unlock(&queue_lock);
    }
    pthread_mutex_lock(&queue_lock);
    ended = 1;
    pthread_cond_broadcast(&queued);
    pthread_mutex_unlock(&queue_lock);
    return NULL;
}

static void *work(void *unused) {
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&queue_lock);
        while (!first && !ended) pthread_cond_wait(&queued, &queue_lock);
        struct request *request = first;
        if (request && !(first = request->next)) last = &first;
        pthread_mutex_unlock(&queue_lock);
        if (!request) return NULL;
        sleep_until(request->due_ns);
        answer(request);
    }
}

int main(int argc, char **argv) {
    if (argc != 7) {
        fprintf(stderr, "usage: slow_files DIRECTORY MOUNT CONTROL ATTRIBUTE_SECONDS "
                        "WITH_ATTRIBUTES WORKERS\n");
        return 2;
    }
    mount_fd = root.fd = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int file = open(argv[3], O_RDWR | O_CLOEXEC);
    if (root.fd < 0 || handle_of(root.fd, &root.handle) || file < 0) {
        perror(file < 0 ? argv[3] : argv[1]);
        return 1;
    }
    control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    attribute_seconds = atof(argv[4]);
    with_attributes = atoi(argv[5]);
    int workers = atoi(argv[6]);
    for (int i = 0; i < LOCKS; i++) pthread_mutex_init(&locks[i], NULL);
    prctl(PR_SET_TIMERSLACK, 1);
    umask(0);

    struct fuse_args arguments = FUSE_ARGS_INIT(1, argv);
    session = fuse_session_new(&arguments, &operations, sizeof operations, NULL);
    int device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    char options[128];
    snprintf(options, sizeof options,
             "fd=%d,rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other", device);
    if (!session || device < 0
        || mount("slow_files", argv[2], "fuse", MS_NODEV | MS_NOSUID, options)
        || fuse_session_custom_io(session, &device_calls, device)) {
        perror(argv[2]);
        return 1;
    }
    pthread_t threads[RECEIVERS + workers];
    for (int i = 0; i < RECEIVERS + workers; i++)
        pthread_create(&threads[i], NULL, i < RECEIVERS ? receive : work, NULL);
    for (int i = 0; i < RECEIVERS + workers; i++) pthread_join(threads[i], NULL);
    return 0;
}
