/* The same system calls as an operation of hicachectl, by threads without anything else.

    ceiling OPERATION THREADS STORE [TARGET]

OPERATION: `list` lists the directory and its folders, and stats each file. `read` then opens,
stats, reads and closes each. `copy` then opens each, copies it to a temporary file of TARGET with
its times, and renames that; at last it syncs the file system. `remove` then stats each file,
renames it to a temporary name, stats and unlinks that.

Files are taken from all folders in turn, since creating, renaming and unlinking exclude each other
in one directory. Names that begin with a dot are left alone.
*/

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define READ_BYTES (1 << 20)
#define TEMPORARY_BYTES 32

struct folder {
    char *name; /* "." for the directory itself */
    int fd, target;
    char **files;
    size_t count, room;
};

struct file {
    struct folder *folder;
    char *name;
    struct stat attributes;
};

static int store, target_store, threads;
static struct folder *folders;
static struct file *files;
static size_t folder_count, file_count;

static int need(int result, const char *what) {
    if (result < 0) {
        perror(what);
        exit(1);
    }
    return result;
}

/* Threads take the numbers below a count, one at a time. */

static void (*step)(size_t number);
static atomic_size_t next;
static size_t end;

static void *take(void *unused) {
    for (size_t number; (number = atomic_fetch_add(&next, 1)) < end;) step(number);
    return unused;
}

static void in_threads(void (*each)(size_t number), size_t count) {
    pthread_t handles[threads];
    step = each;
    next = 0;
    end = count;
    for (int i = 0; i < threads; i++) pthread_create(&handles[i], NULL, take, NULL);
    for (int i = 0; i < threads; i++) pthread_join(handles[i], NULL);
}

static void list_folder(size_t number) {
    struct folder *folder = &folders[number];
    folder->fd = need(openat(store, folder->name, O_RDONLY | O_DIRECTORY), folder->name);
    DIR *entries = fdopendir(dup(folder->fd));
    for (struct dirent *entry; (entry = readdir(entries));) {
        if (entry->d_name[0] == '.' || entry->d_type == DT_DIR) continue;
        if (folder->count == folder->room) {
            folder->room = folder->room ? 2 * folder->room : 256;
            folder->files = realloc(folder->files, folder->room * sizeof *folder->files);
        }
        folder->files[folder->count++] = strdup(entry->d_name);
    }
    closedir(entries);
}

static void list(void) {
    folders = calloc(1, sizeof *folders);
    folders[folder_count++].name = ".";
    DIR *entries = fdopendir(dup(store));
    for (struct dirent *entry; (entry = readdir(entries));) {
        if (entry->d_name[0] == '.' || entry->d_type != DT_DIR) continue;
        folders = realloc(folders, ++folder_count * sizeof *folders);
        folders[folder_count - 1] = (struct folder){.name = strdup(entry->d_name)};
    }
    closedir(entries);
    in_threads(list_folder, folder_count);
    size_t most = 0;
    for (size_t i = 0; i < folder_count; i++) {
        file_count += folders[i].count;
        if (folders[i].count > most) most = folders[i].count;
    }
    files = calloc(file_count + 1, sizeof *files);
    size_t filled = 0;
    for (size_t row = 0; row < most; row++)
        for (size_t i = 0; i < folder_count; i++)
            if (row < folders[i].count)
                files[filled++] = (struct file){&folders[i], folders[i].files[row], {0}};
}

static void stat_name(int folder, const char *name, struct stat *attributes) {
    need(fstatat(folder, name, attributes, AT_SYMLINK_NOFOLLOW), name);
}

static void stat_file(size_t number) {
    struct file *file = &files[number];
    stat_name(file->folder->fd, file->name, &file->attributes);
}

static int open_file(struct file *file, struct stat *attributes) {
    int fd = openat(file->folder->fd, file->name, O_RDONLY | O_NOATIME | O_NOFOLLOW);
    need(fd, file->name);
    need(fstat(fd, attributes), file->name);
    return fd;
}

static void read_file(size_t number) {
    static __thread char *bytes;
    if (!bytes) bytes = malloc(READ_BYTES);
    struct stat attributes;
    int fd = open_file(&files[number], &attributes);
    for (off_t done = 0; done < attributes.st_size;)
        done += need(pread(fd, bytes, READ_BYTES, done), files[number].name);
    close(fd);
}

static char *temporary(size_t number, char *name) {
    snprintf(name, TEMPORARY_BYTES, ".ceiling-%zu.tmp", number);
    return name;
}

static void make_folder(size_t number) {
    struct folder *folder = &folders[number];
    if (strcmp(folder->name, ".")) need(mkdirat(target_store, folder->name, 0755), folder->name);
    folder->target = need(openat(target_store, folder->name, O_RDONLY | O_DIRECTORY), folder->name);
}

static void copy_file(size_t number) {
    struct file *file = &files[number];
    char name[TEMPORARY_BYTES];
    int folder = file->folder->target;
    struct stat attributes;
    int source = open_file(file, &attributes);
    int target = openat(folder, temporary(number, name), O_WRONLY | O_CREAT | O_EXCL, 0644);
    need(target, name);
    for (off_t left = attributes.st_size; left > 0;)
        left -= need(copy_file_range(source, NULL, target, NULL, left, 0), file->name);
    struct timespec times[2] = {attributes.st_mtim, attributes.st_mtim};
    need(futimens(target, times), name);
    close(target);
    need(fstat(source, &attributes), file->name);
    close(source);
    need(renameat2(folder, name, folder, file->name, RENAME_NOREPLACE), file->name);
}

static void remove_file(size_t number) {
    struct file *file = &files[number];
    char name[TEMPORARY_BYTES];
    int folder = file->folder->fd;
    struct stat attributes;
    stat_name(folder, file->name, &attributes);
    need(renameat(folder, file->name, folder, temporary(number, name)), file->name);
    stat_name(folder, name, &attributes);
    need(unlinkat(folder, name, 0), name);
}

int main(int argc, char **argv) {
    if (argc < 4 || (threads = atoi(argv[2])) < 1) {
        fprintf(stderr, "usage: ceiling list|read|copy|remove THREADS STORE [TARGET]\n");
        return 2;
    }
    const char *operation = argv[1];
    store = need(open(argv[3], O_RDONLY | O_DIRECTORY), argv[3]);
    list();
    in_threads(stat_file, file_count);
    if (!strcmp(operation, "read")) in_threads(read_file, file_count);
    if (!strcmp(operation, "remove")) in_threads(remove_file, file_count);
    if (!strcmp(operation, "copy")) {
        need(mkdir(argv[4], 0755), argv[4]);
        target_store = need(open(argv[4], O_RDONLY | O_DIRECTORY), argv[4]);
        in_threads(make_folder, folder_count);
        in_threads(copy_file, file_count);
        need(syncfs(target_store), argv[4]);
    }
    return 0;
}
