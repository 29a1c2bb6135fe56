/* The queue's claims beside the ring: writers that publish in both and are killed between, trainers that claim, read,
 * tell the queue, then the ring, and are killed at every step, leases that end, a successor that reconciles.
 *
 * Each operation of the queue is one transaction, so it is one step; its own death shows as nothing in between. A claim
 * is fenced by its number (`attempts`). Only a trainer's view is kept per trainer: what it claimed, under which number,
 * what it read. A trainer that is killed forgets that; another comes in its place. A stopped trainer is one that is not
 * scheduled while its lease ends. Reconciling looks at ring and queue in one step and acts in a later one.
 *
 * Defines: MAXGEN RANKS TRAINERS ATTEMPTS are sizes; EXPIRES has payloads discarded by their deadline; WRITER_GONE has no
 * writer come back; MUT_* plants a fault. */

#ifndef MAXGEN
#define MAXGEN 2
#endif
#ifndef RANKS
#define RANKS 1
#endif
#ifndef TRAINERS
#define TRAINERS 2
#endif
#ifndef ATTEMPTS
#define ATTEMPTS 3              /* claims in vain after which a delivery is dead */
#endif
#define DELIVERIES (MAXGEN * RANKS)
#define D(k, r) ((k) * RANKS + (r))
#define PAYLOAD(d) ((d) / RANKS)
#define RANK(d) ((d) % RANKS)
#define MY_RANK(t) ((t) % RANKS)
#define BIT(x) (1 << (x))
#define EVERYBODY (BIT(RANKS) - 1)
#define NOTHING 15

bool Q1_consumed_twice;
bool Q2_bytes_of_another_generation;
bool Q3_payload_lost;
bool Q4_stuck;
bool Q5_trained_on_anothers_claim;

/* the ring: one slot, payload k is its generation k + 1 */
#define FREE    0
#define WRITING 1
#define PUBLISHED 2
byte gen, st, done;

/* the queue */
#define UNKNOWN   0
#define READY     1
#define CLAIMED   2
#define DONE      3             /* from here on final */
#define DISCARDED 4
#define DEAD      5
#define FINAL(d) (q[d].is >= DONE)
typedef Delivery { byte is; byte attempts }
Delivery q[DELIVERIES];

/* the writer */
#define W_GONE 0
#define W_IDLE 1
#define W_WRITES 2
#define W_TELLS 3               /* published in the ring, not in the queue */
byte writer = W_IDLE, look = NOTHING;
bool known, all_final;

/* trainers */
#define T_IDLE 0
#define T_CLAIMED 1
#define T_HAS 2                 /* the bytes are here */
#define T_ACKED 3               /* the queue said True; the ring is to be told */
#define T_TOLD 4                /* a fault: the ring was told first */
byte at[TRAINERS], mine[TRAINERS], number[TRAINERS];

/* ghosts */
byte consumed[DELIVERIES];
bool expired[MAXGEN], withdrawn[MAXGEN];
bool aborted[MAXGEN];           /* never published: its writer died while it wrote */
#define UNSEEN(d) aborted[PAYLOAD(d)]
bool calm = false;
byte i, k_;

#define THERE(d) (st == PUBLISHED && gen == PAYLOAD(d) + 1 && !(done & BIT(RANK(d))))
#ifdef MUT_READ_WITHOUT_GENERATION
#define READABLE(d) (st == PUBLISHED && !(done & BIT(RANK(d))))
#else
#define READABLE(d) THERE(d)
#endif

/* A delivery that can still be claimed has its payload, unless that was discarded by request. */
#define NOT_LOST(d) (THERE(d) || expired[PAYLOAD(d)] || withdrawn[PAYLOAD(d)])
#ifdef MUT_REPUBLISH_OF_A_CONSUMED_TICKET    /* to be found by what comes of it */
#define account() skip
#else
inline account() {
  i = 0;
  do
  :: i < DELIVERIES ->
     assert((q[i].is != READY && q[i].is != CLAIMED) || NOT_LOST(i) || Q3_payload_lost);
     assert(i >= gen * RANKS || st == WRITING || q[i].is != UNKNOWN || NOT_LOST(i) || UNSEEN(i) || Q3_payload_lost);
     i++
  :: else -> break
  od;
  i = 0
}
#endif

/* ------------------------------------------------------------------ the ring */
inline free_slot() { st = FREE; done = 0 }
inline ring_consume(d) {
  if
  :: THERE(d) ->
     done = done | BIT(RANK(d));
     if
     :: done == EVERYBODY -> free_slot()
     :: else
     fi
  :: else -> skip
  fi;
  account()
}
inline ring_discard(k) {
  if
  :: st == PUBLISHED && gen == (k) + 1 -> free_slot()
  :: else -> skip
  fi
}

/* ------------------------------------------------------------------ the queue */
inline publish(k) {             /* idempotent per id */
  i = 0;
  do
  :: i < RANKS ->
     if
#ifdef MUT_REPUBLISH_OF_A_CONSUMED_TICKET
     :: q[D(k, i)].is == UNKNOWN || FINAL(D(k, i)) -> q[D(k, i)].is = READY
#else
     :: q[D(k, i)].is == UNKNOWN -> q[D(k, i)].is = READY
#endif
     :: else
     fi;
     i++
  :: else -> break
  od;
  i = 0;
  printf("the queue has payload %d\n", k)
}
#ifdef MUT_CLAIM_NOT_FENCED
#define HELD(t) true
#else
#define HELD(t) (q[mine[t]].is == CLAIMED && q[mine[t]].attempts == number[t])
#endif
inline accept(t) {              /* may be trained on, by who was told so */
  printf("trainer %d consumes delivery %d\n", t, mine[t]);
  assert(!consumed[mine[t]] || Q1_consumed_twice);
  assert(q[mine[t]].attempts == number[t] || Q5_trained_on_anothers_claim);
  consumed[mine[t]] = 1
}
inline let_go(t) { at[t] = T_IDLE; mine[t] = 0; number[t] = 0 }
inline give_back(d) {
  if
  :: q[d].attempts < ATTEMPTS -> q[d].is = READY
  :: else -> q[d].is = DEAD
  fi
}
#define HOLDS(t, d) (at[t] != T_IDLE && mine[t] == d && number[t] == q[d].attempts)
#if TRAINERS == 1
#define SOMEBODY_HOLDS(d) HOLDS(0, d)
#else
#define SOMEBODY_HOLDS(d) (HOLDS(0, d) || HOLDS(1, d))
#endif
inline end_lease(d) {
  printf("the lease of delivery %d ends\n", d);
  give_back(d);
  account()
}

/* ------------------------------------------------------------------ a trainer */
#define CLAIM_OPTION(t, d) \
  :: d_step { at[t] == T_IDLE && RANK(d) == MY_RANK(t) && q[d].is == READY -> \
       q[d].is = CLAIMED; q[d].attempts++; mine[t] = d; number[t] = q[d].attempts; at[t] = T_CLAIMED; \
       printf("trainer %d claims delivery %d, number %d\n", t, d, number[t]) }
#if DELIVERIES == 1
#define CLAIM_OPTIONS(t) CLAIM_OPTION(t, 0)
#elif DELIVERIES == 2
#define CLAIM_OPTIONS(t) CLAIM_OPTION(t, 0) CLAIM_OPTION(t, 1)
#elif DELIVERIES == 3
#define CLAIM_OPTIONS(t) CLAIM_OPTION(t, 0) CLAIM_OPTION(t, 1) CLAIM_OPTION(t, 2)
#else
#define CLAIM_OPTIONS(t) CLAIM_OPTION(t, 0) CLAIM_OPTION(t, 1) CLAIM_OPTION(t, 2) CLAIM_OPTION(t, 3)
#endif

#if defined(MUT_SLOT_ACKED_BEFORE_THE_QUEUE)
#define CONSUME_OPTIONS(t) \
  :: d_step { at[t] == T_HAS -> ring_consume(mine[t]); at[t] = T_TOLD } \
  :: d_step { at[t] == T_TOLD -> \
       if \
       :: HELD(t) -> q[mine[t]].is = DONE; accept(t) \
       :: else -> skip \
       fi; \
       let_go(t) }
#elif defined(MUT_TRAINED_BEFORE_THE_ACK)
#define CONSUME_OPTIONS(t) \
  :: d_step { at[t] == T_HAS -> consumed[mine[t]]++; at[t] = T_ACKED; assert(consumed[mine[t]] < 2 || Q1_consumed_twice) } \
  :: d_step { at[t] == T_ACKED -> \
       if \
       :: HELD(t) -> q[mine[t]].is = DONE; ring_consume(mine[t]) \
       :: else -> skip \
       fi; \
       let_go(t) }
#else
#define CONSUME_OPTIONS(t) \
  :: d_step { at[t] == T_HAS -> \
       if \
       :: HELD(t) -> q[mine[t]].is = DONE; accept(t); at[t] = T_ACKED \
       :: else -> printf("trainer %d: the claim is another's\n", t); let_go(t) \
       fi } \
  :: d_step { at[t] == T_ACKED -> ring_consume(mine[t]); let_go(t) }
#endif
#define TRAINER_OPTIONS(t) \
  CLAIM_OPTIONS(t) \
  :: d_step { at[t] == T_CLAIMED && READABLE(mine[t]) -> \
       assert(gen == PAYLOAD(mine[t]) + 1 || Q2_bytes_of_another_generation); at[t] = T_HAS } \
  :: d_step { at[t] == T_CLAIMED && !READABLE(mine[t]) -> /* StaleSlotError: discarded, and reported by that */ \
       if \
       :: HELD(t) -> q[mine[t]].is = DISCARDED; \
          assert(expired[PAYLOAD(mine[t])] || withdrawn[PAYLOAD(mine[t])] || consumed[mine[t]] || Q3_payload_lost) \
       :: else -> skip \
       fi; \
       let_go(t) } \
  CONSUME_OPTIONS(t) \
  :: d_step { (at[t] == T_CLAIMED || at[t] == T_HAS) && !calm -> /* retry, or given up */ \
       if \
       :: HELD(t) -> give_back(mine[t]) \
       :: else -> skip \
       fi; \
       let_go(t) } \
  :: d_step { at[t] != T_IDLE && !calm -> printf("trainer %d is killed\n", t); let_go(t) }

#ifdef MUT_LEASE_NEVER_ENDS
#define LEASE_OPTION(d)
#else
#define LEASE_OPTION(d) \
  :: d_step { q[d].is == CLAIMED && (!calm || !SOMEBODY_HOLDS(d)) -> end_lease(d) }
#endif
#define EXPIRE_OPTION(k) \
  :: d_step { !calm && st == PUBLISHED && gen == (k) + 1 && q[D(k, 0)].is != UNKNOWN -> expired[k] = true; ring_discard(k) }

/* ------------------------------------------------------------------ the writer and its successors */
#ifdef MUT_NO_RECONCILIATION
#define RECONCILES false
#else
#define RECONCILES (!calm || q[D(gen - 1, 0)].is == UNKNOWN || finished(gen - 1))
#endif
#if RANKS == 1
#define finished(k) FINAL(D(k, 0))
#else
#define finished(k) (FINAL(D(k, 0)) && FINAL(D(k, 1)))
#endif
#ifdef MUT_FREED_WHEN_ONE_RANK_IS_DONE
#define SAID_DONE(k) (FINAL(D(k, 0)) || FINAL(D(k, RANKS - 1)))
#else
#define SAID_DONE(k) finished(k)
#endif
#ifdef WRITER_GONE
#define COMES_BACK (!calm)
#else
#define COMES_BACK true
#endif

active proctype Everybody() {
end:
  do
  :: d_step { writer == W_IDLE && st == FREE && gen < MAXGEN && !calm -> gen++; st = WRITING; writer = W_WRITES }
  :: d_step { writer == W_WRITES -> st = PUBLISHED; writer = W_TELLS }
  :: d_step { writer == W_TELLS -> publish(gen - 1); writer = W_IDLE; account() }
  :: d_step { writer == W_TELLS && !calm ->     /* the queue refuses: withdrawn, and the caller gets the error */
       withdrawn[gen - 1] = true; ring_discard(gen - 1); writer = W_IDLE }
  :: d_step { writer != W_GONE && !calm -> printf("the writer is killed\n"); writer = W_GONE; look = NOTHING; known = false; all_final = false }
  :: d_step { writer == W_GONE && COMES_BACK ->  /* the next one takes the ring over, and reclaims */
       writer = W_IDLE;
       if
#ifdef MUT_TAKE_OVER_STARTS_ANEW
       :: st == PUBLISHED -> free_slot()
#endif
       :: st == WRITING -> aborted[gen - 1] = true; free_slot()
       :: else
       fi;
       account() }
  :: d_step { writer == W_IDLE && look == NOTHING && st == PUBLISHED && RECONCILES ->
       look = gen - 1; known = q[D(gen - 1, 0)].is != UNKNOWN; all_final = SAID_DONE(gen - 1) }
  :: d_step { writer == W_IDLE && look != NOTHING ->
       if
#ifdef MUT_REPUBLISH_OF_A_CONSUMED_TICKET
       :: !known || all_final -> publish(look)
#else
       :: !known -> publish(look)
#endif
       :: known && all_final -> ring_discard(look)
       :: else
       fi;
       look = NOTHING; known = false; all_final = false; account() }
  TRAINER_OPTIONS(0)
#if TRAINERS > 1
  TRAINER_OPTIONS(1)
#endif
  LEASE_OPTION(0)
#if DELIVERIES > 1
  LEASE_OPTION(1)
#endif
#if DELIVERIES > 2
  LEASE_OPTION(2)
#endif
#if DELIVERIES > 3
  LEASE_OPTION(3)
#endif
#ifdef EXPIRES
  EXPIRE_OPTION(0)
#if MAXGEN > 1
  EXPIRE_OPTION(1)
#endif
#endif
  od
}

/* Every delivery has ended: consumed, or reported as discarded or dead. Without a writer what is in the ring alone
 * stays there until it is given up after linger_s. */
active proctype End() {
  calm = true;
  timeout;
  d_step {
    i = 0;
    do
    :: i < DELIVERIES ->
#ifdef WRITER_GONE
       assert(q[i].is == UNKNOWN || FINAL(i) || Q4_stuck);
#else
       assert(st == FREE || Q4_stuck);
       assert(FINAL(i) || i >= gen * RANKS || expired[PAYLOAD(i)] || withdrawn[PAYLOAD(i)] || UNSEEN(i) || Q4_stuck);
#endif
       assert(q[i].is != DONE || consumed[i] || Q3_payload_lost);
       i++
    :: else -> break
    od;
    i = 0
  }
}
