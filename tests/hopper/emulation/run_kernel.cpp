// Runs a launch of a Hopper kernel on the CPU: `emulate(args, ctas, seed)`, 0 = fine. The seed sets how fast each warp is.
#include "warpgroup.h"
#include "kernel.inc"  // arguments, number formats and roles of the source, see the tests
alignas(1024) uint8_t memory[1024];
Fiber* cur; ucontext_t sched; std::vector<Copy> copies; std::vector<Block*> cluster; int cluster_count, cluster_gen, total_threads, block_threads = CTA_THREADS;
static const Args* args;
static void run(void (*kernel)(Args)) { kernel(*args); }
template <class Map> static void run(void (*kernel)(Args, Map)) { kernel(*args, Map{{(uint64_t)args}}); }
static void entry() { run(attend); cur->done = true; swapcontext(&cur->ctx, &sched); }
extern "C" int emulate(const Args* p, int grid, int seed) {
  srand(seed); args = p;
  const size_t STACK = 262144;
  total_threads = CTA_THREADS * SPLITS;
  uint8_t* stacks = (uint8_t*)mmap(0, STACK * total_threads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (int first = 0; first < grid; first += SPLITS) {
    cluster.clear(); copies.clear(); cluster_count = cluster_gen = 0;
    std::vector<Fiber> fibers(total_threads);
    for (int r = 0; r < SPLITS; r++) {
      Block* c = new Block; c->mem = (uint8_t*)malloc(SHARED_LIMIT); memset(c->mem, 0xff, SHARED_LIMIT); c->warps.resize(CTA_THREADS / 32); c->rank = r; cluster.push_back(c);
    }
    for (int i = 0; i < total_threads; i++) {
      Fiber& f = fibers[i]; f.cta = cluster[i / CTA_THREADS]; f.tid.x = i % CTA_THREADS; f.lane = i & 31; f.warp = &f.cta->warps[f.tid.x / 32]; f.bid.x = first + i / CTA_THREADS; f.gdim.x = grid;
      getcontext(&f.ctx); f.ctx.uc_stack.ss_sp = stacks + i * STACK; f.ctx.uc_stack.ss_size = STACK; f.ctx.uc_link = &sched; makecontext(&f.ctx, entry, 0);
    }
    // Some warps are much slower than others: they get a turn seldom, and stop at the next thing that lanes do together.
    std::vector<int> slowness(total_threads / 32);
    for (int& x : slowness) { const int dice = rand() % 8; x = dice == 0 ? 24 : dice == 1 ? 4 : 1; }
    int left = total_threads, idle = 0;
    while (left) {
      bool any = false;
      copies_land(false);
      for (int w = 0; w < total_threads / 32; w++) {
        if (rand() % 4 == 0 || rand() % slowness[w]) continue;
        bool again = true;
        while (again) {
          again = false;
          for (int l = 0; l < 32; l++) {
            Fiber& f = fibers[32 * w + l];
            if (f.done || (f.ready && !f.ready())) continue;
            f.ready = nullptr; cur = &f; swapcontext(&sched, &f.ctx); any = again = true;
            if (f.done) left--;
          }
          if (slowness[w] > 1 || rand() % 8 == 0) break;
        }
      }
      idle = any || !copies.empty() ? 0 : idle + 1;
      if (idle > 3000) { fprintf(stderr, "deadlock\n"); for (int i = 0; i < total_threads; i += 32) fprintf(stderr, "warp %d done %d count %d\n", i / 32, fibers[i].done, fibers[i].warp->count); return 1; }
    }
    if (!copies.empty()) { fprintf(stderr, "copies in flight at the end\n"); return 2; }
    for (Block* c : cluster) { free(c->mem); delete c; }
  }
  munmap(stacks, STACK * total_threads);
  return 0;
}
