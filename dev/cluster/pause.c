/* The first process of every pod and of the node's own namespaces: it waits, and orphans that end beside it are
   collected by the kernel, since their signal is ignored. When it ends, everything in its PID namespace does. */
#include <signal.h>
#include <unistd.h>

static void stop(int number) {
    (void)number;
    _exit(0);
}

int main(void) {
    signal(SIGTERM, stop);
    signal(SIGINT, stop);
    signal(SIGCHLD, SIG_IGN);
    for (;;)
        pause();
}
