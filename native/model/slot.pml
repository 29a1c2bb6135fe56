/* The slot protocol: the operations of the table, one atomic step each.
 *
 * A step of a process is one branch of its loop, so a kill may fall between any two steps, and a
 * stopped process is one the scheduler leaves out for as long as it likes: plain interleaving.
 * A compare-and-swap that fails changes nothing and is tried again, so an operation is one d_step,
 * and an operation that is refused is a branch that is not enabled. The environment is as free as
 * it can be: any listener may be asked at any time for any slot, rank and generation, an attempt may
 * lose its connection or time out between any two steps, and an acknowledgement, once the rank has
 * the payload, may reach any listener at any time, any number of times, or never.
 *
 * The processes stop failing at some moment chosen freely (`calm`). From then on only useful work is
 * done, and the ring must come to rest with every slot free and every payload accounted for.
 *
 * Defines: SLOTS WRITERS LISTENERS ATTEMPTS READERS JANITORS MAXGEN are sizes; OVERWRITE=1 and
 * DISCARD=1 allow these; MIXED lets the number of ranks differ by generation; READERS_GONE has no
 * reader come back once it is calm; LIVENESS adds the ltl; MUT_* plants a fault, with MUTANT. */

#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef WRITERS
#define WRITERS 2
#endif
#ifndef LISTENERS
#define LISTENERS 2
#endif
#ifndef ATTEMPTS
#define ATTEMPTS 1              /* read attempts one listener has in hand at once */
#endif
#ifndef READERS
#define READERS 2               /* ranks a payload is written for */
#endif
#ifndef JANITORS
#define JANITORS 1              /* reclaimers that are no newcomer to the index */
#endif
#ifndef MAXGEN
#define MAXGEN 2                /* takes per slot */
#endif
#ifndef OVERWRITE
#define OVERWRITE 0
#endif
#ifndef DISCARD
#define DISCARD 0
#endif
#define OWNERS (WRITERS + LISTENERS)
#define BYTES 2

#ifdef MIXED
#define READERS_OF(g) (2 - ((g) & 1))   /* odd generations have one rank, even ones two */
#else
#define READERS_OF(g) READERS
#endif
#define RANKS 2
#define ALL(g) ((1 << READERS_OF(g)) - 1)
#define BIT(x) (1 << (x))

#define FREE    0
#define WRITING 1
#define READY   2
#define READING 3

typedef Slot {
  /* the word */
  byte gen; byte st; byte done; byte pins;
  /* the payload: each byte holds the generation it was written for */
  byte b[BYTES];
  /* ghosts, which no operation reads */
  bool freed;       /* this generation went to FREE */
  bool published;
  bool discarded;
  byte got;         /* ranks that have the verified payload */
  byte consumed;    /* ranks whose consume was accepted */
  byte holders;     /* attempts of live listeners that read this memory */
}
Slot w[SLOTS];

/* The kernel lock on each owner's byte. */
#define UNLOCKED 0
#define OWNED    1              /* by the owner, or by the newcomer who takes the index over */
#define HELD(j)  (2 + (j))      /* by reclaimer j */
byte lock[OWNERS];
bool calm = false;

/* Names for the properties: never set, so that a failed assertion prints its name. */
bool P1_bytes_of_another_generation;
bool P2_rewritten_under_a_live_pin;
bool P3_freed_exactly_once;
bool P4_consumed_twice;
bool P5_payload_lost;
bool P6_stuck;
bool P7_read_again_after_consume;
bool P8_word_unsound;
bool LIMIT_overwritten_after_delivery;

/* A planted fault must be found by what it does, so the soundness of the word is not looked at then. */
#ifdef MUTANT
#define SOUND(c) skip
#else
#define SOUND(c) assert((c) || P8_word_unsound)
#endif

/* The faults: the name of each says what it leaves out or does besides. */
#ifdef MUT_PIN_NO_GENERATION
#define PIN_GEN(s, g) true
#else
#define PIN_GEN(s, g) ((g) == w[s].gen)
#endif
#ifdef MUT_CONSUME_NO_GENERATION
#define CONSUME_GEN(s, g) true
#else
#define CONSUME_GEN(s, g) ((g) == w[s].gen)
#endif
#ifdef MUT_CONSUME_IGNORES_DONE
#define CONSUME_DONE(s, r) true
#else
#define CONSUME_DONE(s, r) (!(w[s].done & BIT(r)))
#endif
#ifdef MUT_PIN_IGNORES_DONE
#define PIN_DONE(s, r) true
#else
#define PIN_DONE(s, r) (!(w[s].done & BIT(r)))
#endif
#ifdef MUT_OVERWRITE_IGNORES_PINS
#define OVERWRITABLE(s) (w[s].st == READY || w[s].st == READING)
#else
#define OVERWRITABLE(s) (w[s].st == READY)
#endif

#define PUBLISHED(s) (w[s].st == READY || w[s].st == READING)
#define ONE_BIT(x) ((x) && ((x) & ((x) - 1)) == 0)
#define WELL_FORMED(s) ( \
  (w[s].st == FREE && !w[s].pins) || (w[s].st == WRITING && ONE_BIT(w[s].pins) && !w[s].done) || \
  (w[s].st == READY && !w[s].pins && w[s].done != ALL(w[s].gen)) || (w[s].st == READING && w[s].pins))

/* ------------------------------------------------------------------ the operations of the table */

inline to_free(s) {
  assert(!w[s].freed || P3_freed_exactly_once);
  w[s].freed = true; w[s].st = FREE; w[s].pins = 0; w[s].done = 0; w[s].got = 0
}

/* After a change of done or pins: memory and consumption together decide the state. */
inline settle(s, all) {
  if
  :: w[s].pins != 0 -> SOUND(w[s].st == READING)
#ifdef MUT_UNPIN_FORGETS_DONE
  :: w[s].pins == 0 && w[s].st == READING -> w[s].st = READY
  :: w[s].pins == 0 && w[s].st != READING && w[s].done == all -> to_free(s)
#else
  :: w[s].pins == 0 && w[s].done == all -> to_free(s)
#endif
  :: else -> w[s].st = READY
  fi;
  SOUND(WELL_FORMED(s))
}

/* What became of the generation that is about to end, checked where it ends. */
inline account(s) {
  assert(w[s].gen == 0 || w[s].freed || P3_freed_exactly_once);
  assert(!w[s].published || w[s].discarded || w[s].consumed == ALL(w[s].gen) || P5_payload_lost)
}

inline begin(s, o) {
  w[s].gen++; w[s].st = WRITING; w[s].done = 0; w[s].pins = BIT(o);
  w[s].freed = false; w[s].published = false; w[s].discarded = false; w[s].got = 0; w[s].consumed = 0;
  SOUND(WELL_FORMED(s))
}

#define CAN_TAKE(s) (w[s].st == FREE && w[s].gen < MAXGEN)
inline take(s, o) {
  SOUND(WELL_FORMED(s)); account(s); begin(s, o);
  printf("owner %d: take slot %d, generation %d\n", o, s, w[s].gen)
}

#define CAN_OVERWRITE(s) (OVERWRITE && OVERWRITABLE(s) && w[s].gen < MAXGEN)
inline overwrite(s, o) {        /* the old generation ends here, by request */
#ifdef SHOW_OVERWRITE_AFTER_DELIVERY
  assert(w[s].got == 0 || LIMIT_overwritten_after_delivery);
#endif
  begin(s, o);
  printf("owner %d: overwrite slot %d, generation %d\n", o, s, w[s].gen)
}

#define MINE(s, o) (w[s].st == WRITING && w[s].pins == BIT(o))
inline publish(s, o) {
  if
  :: MINE(s, o) -> w[s].st = READY; w[s].pins = 0; w[s].published = true;
     printf("owner %d: publish slot %d\n", o, s)
  :: else -> SOUND(false)       /* a live writer has lost its slot */
  fi
}

inline abort(s, o) {
  if
  :: MINE(s, o) -> to_free(s); printf("owner %d: abort slot %d\n", o, s)
  :: else -> SOUND(false)
  fi
}

#define CAN_PIN(s, g, r) (PUBLISHED(s) && PIN_GEN(s, g) && PIN_DONE(s, r) && (r) < READERS_OF(g))
inline pin(s, r, o) {
  assert(!(w[s].consumed & BIT(r)) || P7_read_again_after_consume);
  w[s].st = READING; w[s].pins = w[s].pins | BIT(o);
  printf("owner %d: pin slot %d for rank %d\n", o, s, r)
}

inline drop_pin(s, o) {
#ifdef MUT_FIRST_FINISH_FREES
  w[s].pins = 0
#else
  w[s].pins = w[s].pins & ~BIT(o)
#endif
}

#define CAN_UNPIN(s, o) (w[s].st == READING && (w[s].pins & BIT(o)))
inline unpin(s, o) {
  if
  :: CAN_UNPIN(s, o) -> drop_pin(s, o); settle(s, ALL(w[s].gen)); printf("owner %d: unpin slot %d\n", o, s)
  :: else -> skip               /* returns False, and is counted */
  fi
}

#define CAN_CONSUME(s, g, r) (PUBLISHED(s) && CONSUME_GEN(s, g) && CONSUME_DONE(s, r))
inline accept(s, r) {
  assert(!(w[s].consumed & BIT(r)) || P4_consumed_twice);
  assert((w[s].got & BIT(r)) || P5_payload_lost);       /* nobody consumes what he does not have */
  w[s].consumed = w[s].consumed | BIT(r);
  w[s].done = w[s].done | BIT(r)
}
inline consume(s, r, all) {
  printf("a listener: consume slot %d by rank %d\n", s, r);
  accept(s, r);
#ifdef MUT_CONSUME_IGNORES_PINS
  if
  :: w[s].done == all -> to_free(s)
  :: else -> skip
  fi
#else
  settle(s, all)
#endif
}

/* consume + unpin in one swap. The pin goes whether or not the consume is accepted: the rank may be
 * done already through the other listener, and this owner will not come back to finalise again. */
inline mark_consumed(s, g, r, o, last) {
  printf("owner %d: mark_consumed slot %d by rank %d\n", o, s, r);
#ifdef MUT_REFUSED_MARK_KEEPS_PIN
  if
  :: CAN_CONSUME(s, g, r) && CAN_UNPIN(s, o) ->
#else
  if
  :: CAN_UNPIN(s, o) ->
#endif
     if
     :: CAN_CONSUME(s, g, r) -> accept(s, r)
     :: else -> skip
     fi;
     if
     :: last -> drop_pin(s, o)  /* the owner's last attempt on this slot */
     :: else -> skip
     fi;
     settle(s, ALL(w[s].gen))
  :: else -> skip
  fi
}

#define CAN_DISCARD(s) (DISCARD && PUBLISHED(s) && w[s].done != ALL(w[s].gen))
inline discard(s) {
  printf("discard slot %d\n", s);
  w[s].done = ALL(w[s].gen); w[s].discarded = true;
#ifdef MUT_DISCARD_IGNORES_PINS
  to_free(s)
#else
  settle(s, ALL(w[s].gen))
#endif
}

#define HAS_BIT(s, o) (w[s].pins & BIT(o))
inline reclaim(s, o) {
  printf("reclaim slot %d from owner %d\n", s, o);
  if
#ifndef MUT_WRITING_NOT_RECLAIMED
  :: w[s].st == WRITING -> to_free(s)
#endif
  :: w[s].st == READING -> drop_pin(s, o); settle(s, ALL(w[s].gen))
  :: else -> SOUND(w[s].st == WRITING)
  fi
}

/* ------------------------------------------------------------------ lists over the slots */
#define PARKED(s) (w[s].st == FREE || w[s].st == READY)
#if SLOTS == 1
#define ANY_BIT(o) HAS_BIT(0, o)
#define ALL_FREE (w[0].st == FREE)
#define ALL_PARKED PARKED(0)
#elif SLOTS == 2
#define ANY_BIT(o) (HAS_BIT(0, o) || HAS_BIT(1, o))
#define ALL_FREE (w[0].st == FREE && w[1].st == FREE)
#define ALL_PARKED (PARKED(0) && PARKED(1))
#else
#define ANY_BIT(o) (HAS_BIT(0, o) || HAS_BIT(1, o) || HAS_BIT(2, o))
#define ALL_FREE (w[0].st == FREE && w[1].st == FREE && w[2].st == FREE)
#define ALL_PARKED (PARKED(0) && PARKED(1) && PARKED(2))
#endif

/* How it must end: the readers see to everything, or they never come back. */
#ifdef READERS_GONE
#define SERVING (!calm)
#define AT_REST ALL_PARKED
#else
#define SERVING true
#define AT_REST ALL_FREE
#endif

/* ------------------------------------------------------------------ owners: birth and death */
#define DEAD     0
#define CLEARING 1              /* holds the lock of the index, has not yet cleared its predecessor's bits */
#define UP       2

/* A newcomer takes the lock of the index and finishes the clearing himself before he is up. */
#define CAN_ATTACH(o) (life == DEAD && lock[o] == UNLOCKED && (!calm || NEWCOMERS(o)))
#if JANITORS == 0               /* newcomers alone must do all the clearing in the end */
#define NEWCOMERS(o) true
#else                           /* reclaimers alone must: only a listener comes back, to serve */
#define NEWCOMERS(o) ((o) >= WRITERS && SERVING)
#endif
#ifdef MUT_REUSE_BEFORE_CLEARING
#define NEWBORN UP
#else
#define NEWBORN CLEARING
#endif
#define RECLAIM_OPTION(s, o) :: d_step { life == CLEARING && HAS_BIT(s, o) -> reclaim(s, o) }
#define CAN_GO_UP(o) (life == CLEARING && !ANY_BIT(o))

/* ------------------------------------------------------------------ writers */
#if defined(MUT_PUBLISH_NO_GENERATION) || defined(MUT_ABORT_UNCHECKED)
#define FINISHES_TWICE
#endif
#define TAKE_OPTION(x) \
  :: d_step { life == UP && !busy && !calm && CAN_TAKE(x) -> take(x, o); s = x; busy = true } \
  :: d_step { life == UP && !busy && !calm && CAN_OVERWRITE(x) -> overwrite(x, o); s = x; busy = true }

proctype Writer(byte o) {
  byte life = UP, s, k;         /* k bytes are written */
  bool busy;
#ifdef FINISHES_TWICE
  byte late;                    /* a slot this process finished before, and finishes once more */
#endif
end:
  do
  TAKE_OPTION(0)
#if SLOTS > 1
  TAKE_OPTION(1)
#endif
#if SLOTS > 2
  TAKE_OPTION(2)
#endif
  :: d_step { busy && k < BYTES ->
       assert(w[s].holders == 0 || P2_rewritten_under_a_live_pin);
       w[s].b[k] = w[s].gen; k++; printf("owner %d: write a byte of slot %d\n", o, s) }
  :: d_step { busy && k == BYTES -> publish(s, o);
#ifdef FINISHES_TWICE
       late = 1 + s;
#endif
       s = 0; k = 0; busy = false }
  :: d_step { busy -> abort(s, o);
#ifdef FINISHES_TWICE
       late = 1 + s;
#endif
       s = 0; k = 0; busy = false }
#ifdef MUT_PUBLISH_NO_GENERATION
  :: d_step { busy && late == 1 + s -> publish(s, o); late = 0; s = 0; k = 0; busy = false }
#endif
#ifdef MUT_ABORT_UNCHECKED
  :: d_step { life == UP && late != 0 -> to_free(late - 1); late = 0 }
#endif
  :: d_step { life != DEAD && !calm ->
#ifdef FINISHES_TWICE
       late = 0;
#endif
       life = DEAD; lock[o] = UNLOCKED; s = 0; k = 0; busy = false;
       printf("owner %d: killed\n", o) }
  :: d_step { CAN_ATTACH(o) -> lock[o] = OWNED; life = NEWBORN; printf("owner %d: a newcomer has its lock\n", o) }
  RECLAIM_OPTION(0, o)
#if SLOTS > 1
  RECLAIM_OPTION(1, o)
#endif
#if SLOTS > 2
  RECLAIM_OPTION(2, o)
#endif
  :: d_step { CAN_GO_UP(o) -> life = UP; printf("owner %d: up again\n", o) }
  od
}

/* ------------------------------------------------------------------ listeners */
/* An attempt: pinned, then the bytes go out one by one, then it waits for its end. A mapped reader
 * is the same thing with the reader in the process. */
#define NONE 0
typedef Attempt { byte n; byte where; byte ticket; byte whom }      /* n: NONE, else 1 + bytes sent */
#define SENT (1 + BYTES)

#if ATTEMPTS == 1
#define LAST(i) true
#else                           /* the owner counts its attempts on a slot in its own memory */
#define LAST(i) (a[1 - (i)].n == NONE || a[1 - (i)].where != a[i].where)
#endif

inline forget(i) { w[a[i].where].holders--; a[i].n = NONE; a[i].where = 0; a[i].ticket = 0; a[i].whom = 0 }

inline give_up(i) {             /* connection lost, or timed out, at whatever point */
  if
  :: LAST(i) -> unpin(a[i].where, o)
  :: else -> skip
  fi
}

#define ASK(i, x, gen_, rank_) \
  :: d_step { SERVING && life == UP && a[i].n == NONE && (gen_) > 0 && CAN_PIN(x, gen_, rank_) -> \
       pin(x, rank_, o); w[x].holders++; \
       a[i].n = 1; a[i].where = x; a[i].ticket = gen_; a[i].whom = rank_ }
#define ASK_SLOT(i, x) \
  ASK(i, x, w[x].gen, 0) ASK(i, x, w[x].gen, 1) ASK(i, x, w[x].gen - 1, 0) ASK(i, x, w[x].gen - 1, 1)
#if SLOTS == 1
#define ASK_ALL(i) ASK_SLOT(i, 0)
#elif SLOTS == 2
#define ASK_ALL(i) ASK_SLOT(i, 0) ASK_SLOT(i, 1)
#else
#define ASK_ALL(i) ASK_SLOT(i, 0) ASK_SLOT(i, 1) ASK_SLOT(i, 2)
#endif

#ifdef MUT_FREE_ON_SEND
#define AT_SEND(i) if :: a[i].n == SENT -> mark_consumed(a[i].where, a[i].ticket, a[i].whom, o, LAST(i)) :: else fi
#else
#define AT_SEND(i) skip
#endif

#define ATTEMPT_OPTIONS(i) \
  ASK_ALL(i) \
  :: d_step { a[i].n != NONE && a[i].n < SENT -> \
       assert(w[a[i].where].b[a[i].n - 1] == a[i].ticket || P1_bytes_of_another_generation); \
       a[i].n++; printf("owner %d: send a byte of slot %d\n", o, a[i].where); AT_SEND(i) } \
  :: d_step { SERVING && a[i].n == SENT && a[i].ticket == w[a[i].where].gen && !(w[a[i].where].got & BIT(a[i].whom)) -> \
       w[a[i].where].got = w[a[i].where].got | BIT(a[i].whom);         /* delivered and verified */ \
       printf("rank %d has the payload of slot %d\n", a[i].whom, a[i].where) } \
  :: d_step { a[i].n != NONE && (w[a[i].where].got & BIT(a[i].whom)) ->        /* its acknowledgement came */ \
       mark_consumed(a[i].where, a[i].ticket, a[i].whom, o, LAST(i)); forget(i) } \
  :: d_step { a[i].n == SENT && (w[a[i].where].done & BIT(a[i].whom)) ->       /* sees it done elsewhere */ \
       mark_consumed(a[i].where, a[i].ticket, a[i].whom, o, LAST(i)); forget(i) } \
  :: d_step { a[i].n != NONE && (!calm || !SERVING) -> give_up(i); forget(i) }

inline vanish(i) {
  if
  :: a[i].n != NONE -> forget(i)
  :: else -> skip
  fi
}

proctype Listener(byte o) {
  byte life = UP;
  Attempt a[ATTEMPTS];
#ifdef MUT_LATE_UNPIN
  byte late;                    /* a slot whose attempt ended, and is ended once more */
#endif
#ifdef MUT_COUNT_WITHOUT_MUTEX
  byte clear;                   /* a thread saw the count fall to zero and has yet to clear the bit */
#endif
end:
  do
  ATTEMPT_OPTIONS(0)
#if ATTEMPTS > 1
  ATTEMPT_OPTIONS(1)
#endif
#ifdef MUT_UNPIN_WHILE_SENDING           /* the attempt is given up, and the transport still reads */
  :: d_step { a[0].n != NONE && a[0].n < SENT && !calm -> give_up(0) }
#endif
#ifdef MUT_LATE_UNPIN
  :: d_step { a[0].n != NONE && !calm && late == 0 -> late = 1 + a[0].where; give_up(0); forget(0) }
  :: d_step { late != 0 -> unpin(late - 1, o); late = 0 }
#endif
#ifdef MUT_COUNT_WITHOUT_MUTEX
  :: d_step { a[0].n != NONE && !calm && clear == 0 && LAST(0) -> clear = 1 + a[0].where; forget(0) }
  :: d_step { clear != 0 -> unpin(clear - 1, o); clear = 0 }
#endif
  :: d_step { life != DEAD && !calm ->
       life = DEAD; lock[o] = UNLOCKED; printf("owner %d: killed\n", o);
#ifdef MUT_LATE_UNPIN
       late = 0;
#endif
#ifdef MUT_COUNT_WITHOUT_MUTEX
       clear = 0;
#endif
       vanish(0);
#if ATTEMPTS > 1
       vanish(1)
#endif
     }
  :: d_step { CAN_ATTACH(o) -> lock[o] = OWNED; life = NEWBORN; printf("owner %d: a newcomer has its lock\n", o) }
  RECLAIM_OPTION(0, o)
#if SLOTS > 1
  RECLAIM_OPTION(1, o)
#endif
#if SLOTS > 2
  RECLAIM_OPTION(2, o)
#endif
  :: d_step { CAN_GO_UP(o) -> life = UP; printf("owner %d: up again\n", o) }
  od
}

/* ------------------------------------------------------------------ reclaimers */
/* Any process may be one; its death is a step of its own here, and leaves the work half done. A
 * clearing in slot order is one of the orders tried. */
#define NOBODY 255
#ifdef MUT_RECLAIM_WITHOUT_LOCK         /* looks whether the lock is free, and does not keep it */
#define KEEP_LOCK(o) skip
#define LET_GO(o) skip
#define LOCKABLE(o) (lock[o] == UNLOCKED)
#else
#define KEEP_LOCK(o) lock[o] = HELD(j)
#define LET_GO(o) if :: lock[o] >= HELD(0) -> lock[o] = UNLOCKED :: else fi
#ifdef MUT_LOCK_SHARED_BY_THREADS       /* one open file description: the second thread gets it too */
#define LOCKABLE(o) (lock[o] != OWNED)
#else
#define LOCKABLE(o) (lock[o] == UNLOCKED)
#endif
#endif
#define LOCK_OPTION(x) \
  :: d_step { o == NOBODY && LOCKABLE(x) && ANY_BIT(x) -> KEEP_LOCK(x); o = x; printf("reclaimer %d: owner %d is dead\n", j, x) }
#define CLEAR_OPTION(x) \
  :: d_step { o != NOBODY && HAS_BIT(x, o) -> reclaim(x, o) }

proctype Janitor(byte j) {
  byte o = NOBODY;
end:
  do
  LOCK_OPTION(0)
  LOCK_OPTION(1)
#if OWNERS > 2
  LOCK_OPTION(2)
#endif
#if OWNERS > 3
  LOCK_OPTION(3)
#endif
  CLEAR_OPTION(0)
#if SLOTS > 1
  CLEAR_OPTION(1)
#endif
#if SLOTS > 2
  CLEAR_OPTION(2)
#endif
  :: d_step { o != NOBODY && (!calm || !ANY_BIT(o)) -> LET_GO(o);
       printf("reclaimer %d: lets owner %d go\n", j, o); o = NOBODY }   /* finished, or killed */
  od
}

/* ------------------------------------------------------------------ acknowledgements and discards */
/* They come in through any listener; which one has no part in the operation. */
#define LISTENING (SERVING && (lock[WRITERS] == OWNED || lock[OWNERS - 1] == OWNED))
#ifdef MUT_READERS_BEFORE_WORD          /* how many ranks there are is read before the word is */
#define NEED(s) need[s]
#define LOOK(x) :: d_step { need[x] != ALL(w[x].gen) -> need[x] = ALL(w[x].gen) }
#else
#define NEED(s) ALL(w[s].gen)
#define LOOK(x)
#endif
/* The current generation is acknowledged by a rank that has it; an older one by anybody. */
#define ACK(x, r_) \
  :: d_step { LISTENING && CAN_CONSUME(x, w[x].gen, r_) && (w[x].got & BIT(r_)) -> consume(x, r_, NEED(x)) } \
  :: d_step { LISTENING && w[x].gen > 1 && CAN_CONSUME(x, w[x].gen - 1, r_) -> consume(x, r_, NEED(x)) }
#define WIRE_OPTIONS(x) ACK(x, 0) ACK(x, 1) LOOK(x) \
  :: d_step { !calm && CAN_DISCARD(x) -> discard(x) }

proctype Wire() {
#ifdef MUT_READERS_BEFORE_WORD
  byte need[SLOTS];
#endif
end:
  do
  WIRE_OPTIONS(0)
#if SLOTS > 1
  WIRE_OPTIONS(1)
#endif
#if SLOTS > 2
  WIRE_OPTIONS(2)
#endif
  od
}

/* ------------------------------------------------------------------ the end */
/* `timeout`: nobody has anything left to do. */
init {
  byte i;
  atomic {
    do
    :: i < OWNERS -> lock[i] = OWNED;
       if
       :: i < WRITERS -> run Writer(i)
       :: else -> run Listener(i)
       fi;
       i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < JANITORS -> run Janitor(i); i++
    :: else -> break
    od;
    i = 0;
    run Wire()
  }
  d_step { calm = true; printf("nothing fails from here on\n") }
  timeout;
  assert(AT_REST || P6_stuck)
}

#ifdef LIVENESS
/* Once nothing fails any more, every run comes to rest, without any fairness. */
ltl comes_to_rest { [] (calm -> <> AT_REST) }
#endif
