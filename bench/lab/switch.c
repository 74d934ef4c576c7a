/* A switch between TAP devices, one on each emulated host: a latency for all, a rate for each port.

   switch LATENCY_NS CONTROL HOST...

   makes an "eth0" in each host's network namespace and forwards frames by the last byte of the
   destination address, which is the number of the host from 1.  A frame leaves a port when those
   before it have, at the port's rate, and arrives LATENCY_NS later.  CONTROL is a named pipe that
   takes lines "PORT RATE": port from 0, bit/s, 0 for no limit.  Needs root; Linux only. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PORTS = 64, LARGEST = 65536 + 256, READS = 16, HEADERS = 66 };
static const int64_t QUEUE_NS = 20000000; /* frames that would wait longer are dropped */
static const int64_t SECOND = 1000000000;

typedef struct frame {
    struct frame *next;
    int64_t due;
    int length;
    unsigned char data[];
} frame;

typedef struct {
    int fd;
    int64_t rate, free_at;
    frame *first, **end;
} port;

static port ports[MAX_PORTS];
static int count;
static int64_t latency;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int open_tap(const char *host) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", host);
    int space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET)) die(path);
    close(space);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (fd < 0) die("/dev/net/tun");
    struct ifreq request = {.ifr_name = "eth0", .ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    int header = sizeof(struct virtio_net_hdr), unlimited = 1 << 30;
    if (ioctl(fd, TUNSETIFF, &request)) die("TUNSETIFF");
    if (ioctl(fd, TUNSETVNETHDRSZ, &header)) die("TUNSETVNETHDRSZ");
    /* Segments of up to 64 KiB pass uncut, which two cores need. */
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) die("TUNSETOFFLOAD");
    if (ioctl(fd, TUNSETSNDBUF, &unlimited)) die("TUNSETSNDBUF");
    return fd;
}

/* Bytes that a frame would have on a wire, where a large segment is many packets. */
static int64_t wire_bytes(const unsigned char *data, int length) {
    struct virtio_net_hdr header;
    memcpy(&header, data, sizeof header);
    int64_t bytes = length - (int)sizeof header;
    if (header.gso_type != VIRTIO_NET_HDR_GSO_NONE && header.gso_size)
        bytes += (bytes - HEADERS - 1) / header.gso_size * HEADERS;
    return bytes;
}

static void enqueue(port *to, const unsigned char *data, int length, int64_t time) {
    int64_t begin = to->free_at > time ? to->free_at : time;
    if (begin - time > QUEUE_NS) return;
    to->free_at = begin + (to->rate ? wire_bytes(data, length) * 8 * SECOND / to->rate : 0);
    frame *f = malloc(sizeof *f + length);
    if (!f) die("malloc");
    f->next = NULL;
    f->due = to->free_at + latency;
    f->length = length;
    memcpy(f->data, data, length);
    *to->end = f;
    to->end = &f->next;
}

static void deliver(port *to, int64_t time) {
    frame *f;
    while ((f = to->first) && f->due <= time) {
        if (write(to->fd, f->data, f->length) < 0 && errno == EAGAIN) return;
        to->first = f->next;
        if (!to->first) to->end = &to->first;
        free(f);
    }
}

static void take_in(int from) {
    static unsigned char data[LARGEST];
    for (int n = 0; n < READS; n++) {
        int length = read(ports[from].fd, data, sizeof data);
        if (length <= (int)sizeof(struct virtio_net_hdr) + 14) return;
        const unsigned char *address = data + sizeof(struct virtio_net_hdr);
        int64_t time = now();
        for (int i = 0; i < count; i++) {
            int is_meant = address[0] & 1 ? i != from : i == address[5] - 1;
            if (is_meant) enqueue(&ports[i], data, length, time);
        }
    }
}

static void obey(int control) {
    char text[4096], *line = text, *end;
    int length = read(control, text, sizeof text - 1);
    if (length <= 0) return;
    text[length] = 0;
    for (; (end = strchr(line, '\n')); line = end + 1) {
        int number;
        long long rate;
        if (sscanf(line, "%d %lld", &number, &rate) == 2 && number >= 0 && number < count)
            ports[number].rate = rate;
    }
}

int main(int argc, char **argv) {
    if (argc < 4 || argc - 3 > MAX_PORTS) return 2;
    latency = atoll(argv[1]);
    int control = open(argv[2], O_RDWR | O_NONBLOCK | O_CLOEXEC); /* RDWR: no end of file */
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (control < 0 || home < 0) die(argv[2]);
    count = argc - 3;
    struct pollfd polled[MAX_PORTS + 1];
    for (int i = 0; i < count; i++) {
        ports[i].fd = open_tap(argv[3 + i]);
        ports[i].end = &ports[i].first;
        polled[i] = (struct pollfd){.fd = ports[i].fd, .events = POLLIN};
    }
    if (setns(home, CLONE_NEWNET)) die("setns");
    polled[count] = (struct pollfd){.fd = control, .events = POLLIN};
    /* Before all ranks: a switch that waits for a core is no switch. */
    struct sched_param priority = {.sched_priority = 10};
    if (sched_setscheduler(0, SCHED_FIFO, &priority)) perror("SCHED_FIFO");
    prctl(PR_SET_TIMERSLACK, 1);
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t time = now(), next = INT64_MAX;
        for (int i = 0; i < count; i++) {
            deliver(&ports[i], time);
            if (ports[i].first && ports[i].first->due < next) next = ports[i].first->due;
        }
        int64_t wait = next - now();
        if (wait < 0) wait = 0;
        struct timespec timeout = {wait / SECOND, wait % SECOND};
        if (ppoll(polled, count + 1, next == INT64_MAX ? NULL : &timeout, NULL) < 0) {
            if (errno == EINTR) continue;
            die("ppoll");
        }
        if (polled[count].revents) obey(control);
        for (int i = 0; i < count; i++)
            if (polled[i].revents & POLLIN) take_in(i);
    }
}
