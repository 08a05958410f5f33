// vLLM's rules for the blocks of the KV cache, for a dense model: who gets a block, who waits, who is preempted. No DOM
// here. tests/test_block_table.py runs vLLM's own scheduler beside it. Lines are those of vLLM 0.33.0, in vllm/v1/core.
//
// Left out: chunked prefill (a step has room for every prompt), a limit on running requests, steps that overlap
// (asynchronous scheduling), priorities, speculative decoding, KV connectors.
globalThis.memlabBlockPool = (() => {
  // block_pool.py
  class BlockPool {
    // Block 0 is the null block, which no request gets (:191). The others are free, by number (kv_cache_utils.py:258).
    constructor(count) {
      this.blocks = Array.from({ length: count }, (_, id) => ({ id, references: 0, hash: null }));
      this.free = this.blocks.slice(1);
      this.cached = new Map();
    }

    get usage() {
      return 1 - this.free.length / (this.blocks.length - 1);
    }

    // Several blocks can hold the same content: the first that was cached is found (:63).
    find(hash) {
      return this.cached.get(hash)?.[0];
    }

    // From the front of the free queue (:706). What a block held for prefix caching is forgotten only now.
    take(count) {
      const taken = this.free.splice(0, count);
      for (const block of taken) {
        this.forget(block);
        block.references = 1;
      }
      return taken;
    }

    // A hit: one more request holds the block, and it leaves the free queue if it was there (:792).
    touch(blocks) {
      this.free = this.free.filter((block) => !blocks.includes(block));
      for (const block of blocks) block.references += 1;
    }

    // In the order given, cached blocks go to the end of the queue, the others to its front (:816).
    release(blocks) {
      const released = blocks.filter((block) => --block.references === 0);
      const first = released.filter((block) => block.hash === null);
      const last = released.filter((block) => block.hash !== null);
      this.free = [...first, ...this.free, ...last];
      return released;
    }

    cache(block, hash) {
      block.hash = hash;
      this.cached.set(hash, [...(this.cached.get(hash) ?? []), block]);
    }

    forget(block) {
      if (block.hash === null) return;
      const left = this.cached.get(block.hash).filter((other) => other !== block);
      if (left.length) this.cached.set(block.hash, left);
      else this.cached.delete(block.hash);
      block.hash = null;
    }
  }

  // sched/scheduler.py and kv_cache_manager.py
  class Scheduler {
    constructor({ blocks, blockSize, prefixCaching }) {
      Object.assign(this, { blockSize, prefixCaching });
      this.pool = new BlockPool(blocks);
      this.running = [];
      this.waiting = [];
      this.preemptions = 0;
      this.queries = 0;
      this.hits = 0;
    }

    // Slots of the running requests' last blocks that hold no token.
    get wasted() {
      return this.running.reduce((sum, { blocks, computed }) => sum + blocks.length * this.blockSize - computed, 0);
    }

    // `prompt` and `answer` are arrays of tokens. The request ends with its answer, or with finish().
    add({ name, prompt, answer }) {
      const room = (this.pool.blocks.length - 1) * this.blockSize;
      if (prompt.length + answer.length > room) {
        throw new RangeError(`Request ${name} is longer than the ${room} tokens of the pool: it would never run.`);
      }
      const counts = { written: 0, computed: 0, cached: 0, preempted: 0 };
      this.waiting.push({ name, answer, tokens: [...prompt], blocks: [], ...counts });
    }

    // One pass of the model. First each running request gets its next token, then waiting ones are admitted, in order.
    step() {
      const done = { admitted: [], preempted: [], finished: [], blocked: null };
      const scheduled = this.continueRunning(done);
      if (!done.preempted.length) scheduled.push(...this.admit(done));
      for (const request of scheduled) {
        request.computed = request.tokens.length;
        request.tokens.push(request.answer[request.written]);
        request.written += 1;
        if (request.written === request.answer.length) {
          this.finish(request.name);
          done.finished.push(request);
        }
      }
      return done;
    }

    // Where no block is left for a running request, the last of those running gives up its own (scheduler.py:928-985).
    continueRunning(done) {
      const scheduled = [];
      while (scheduled.length < this.running.length) {
        const request = this.running[scheduled.length];
        if (this.allocate(request)) {
          scheduled.push(request);
          continue;
        }
        const victim = this.running.pop();
        done.preempted.push({ request: victim, freed: this.preempt(victim), lacking: request });
      }
      return scheduled;
    }

    // The first one that does not fit stops the rest (scheduler.py:1050, :1454).
    admit(done) {
      const scheduled = [];
      while (this.waiting.length) {
        const request = this.waiting[0];
        const hits = this.cachedBlocks(request);
        if (!this.allocate(request, hits)) {
          done.blocked = { request, needed: this.required(request, hits), free: this.pool.free.length };
          break;
        }
        const found = hits.length * this.blockSize;
        if (this.prefixCaching && !request.preempted) {
          this.queries += request.tokens.length;
          this.hits += found;
        }
        this.running.push(this.waiting.shift());
        scheduled.push(request);
        done.admitted.push({ request, found, computed: request.tokens.length - found });
      }
      return scheduled;
    }

    // The longest run of cached blocks from the start (single_type_kv_cache_manager.py:794). The last token is computed
    // in any case, since the next one comes from it (kv_cache_manager.py:295).
    cachedBlocks(request) {
      const found = [];
      if (!this.prefixCaching) return found;
      const most = Math.floor((request.tokens.length - 1) / this.blockSize);
      while (found.length < most) {
        const block = this.pool.find(this.hash(request, found.length));
        if (!block) break;
        found.push(block);
      }
      return found;
    }

    // vLLM chains: a hash covers a block's tokens and the hash before it (kv_cache_utils.py:707), so the whole prefix.
    hash(request, index) {
      return request.tokens.slice(0, (index + 1) * this.blockSize).join();
    }

    // What the free queue must have. A hit that nobody holds is in that queue, so it counts (kv_cache_manager.py:585,
    // single_type_kv_cache_manager.py:256).
    required(request, hits = []) {
      const all = Math.ceil(request.tokens.length / this.blockSize);
      return all - request.blocks.length - hits.filter((block) => block.references > 0).length;
    }

    allocate(request, hits = []) {
      if (this.required(request, hits) > this.pool.free.length) return false;
      this.pool.touch(hits);
      request.cached += hits.length;
      request.blocks.push(...hits);
      request.blocks.push(...this.pool.take(this.required(request)));
      if (this.prefixCaching) {
        for (; (request.cached + 1) * this.blockSize <= request.tokens.length; request.cached += 1) {
          this.pool.cache(request.blocks[request.cached], this.hash(request, request.cached));
        }
      }
      return true;
    }

    // To the front of the queue (scheduler.py:1799). It keeps what it has written, and computes it again as far as its
    // blocks are not cached any more.
    preempt(request) {
      request.preempted += 1;
      this.preemptions += 1;
      this.waiting.unshift(request);
      return this.release(request);
    }

    // Ended from outside, or with the answer. One that has ended already is passed over.
    finish(name) {
      const request = [...this.running, ...this.waiting].find((one) => one.name === name);
      if (!request) return [];
      this.running = this.running.filter((one) => one !== request);
      this.waiting = this.waiting.filter((one) => one !== request);
      return this.release(request);
    }

    // What nobody else holds is free: from the last block to the first, so that the end of a sequence is overwritten
    // before its beginning (single_type_kv_cache_manager.py:598).
    release(request) {
      const freed = this.pool.release([...request.blocks].reverse());
      Object.assign(request, { blocks: [], cached: 0, computed: 0 });
      return freed;
    }
  }

  return { Scheduler };
})();
