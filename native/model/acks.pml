/* Frames and acknowledgements: one rank's client, its ledger, its record of duplicates, and a connection to each of the
 * ring's listeners, which may be lost between any two steps.
 *
 * A message carries acknowledgements and at most one READ, a listener handles the messages of a connection in order, and
 * each READ has one answer. A loss empties both directions at once; whatever had been handled before stays handled, so
 * every prefix is tried. The client is as transport/client/connections/acknowledgements.py: pending, sent with a message, confirmed by the answer to
 * that message or a later one, pending again when the connection is lost, to go through any other. The same ticket may
 * be handed to the client again at any time (a claim that came back), so what it has had is told by ledger and record.
 *
 * The slot is what slot.pml shows of it: one word, changed by its operations. A payload is `k`: slot and generation.
 * Defines: SLOTS MAXGEN LISTENERS NUMBERS are sizes; ONE_GOES has listener 1 go for good; MUT_* plants a fault. */

#ifndef SLOTS
#define SLOTS 1
#endif
#ifndef MAXGEN
#define MAXGEN 2
#endif
#ifndef LISTENERS
#define LISTENERS 2
#endif
#ifndef NUMBERS
#define NUMBERS 3               /* messages of one connection, which is then retired */
#endif
#define KEYS (SLOTS * MAXGEN)
#define BIT(x) (1 << (x))
#define SLOT(k) ((k) / MAXGEN)
#define GEN(k) ((k) % MAXGEN + 1)
#define NOTHING 15

bool D1_bytes_of_another_generation;
bool D2_consumed_twice;
bool D3_freed_before_it_was_consumed;
bool D4_stuck;

typedef Slot { byte gen; bool ready; bool done; byte pins }
Slot w[SLOTS];
byte holds[LISTENERS];          /* the attempt of each listener: k, or NOTHING */
bool gone[LISTENERS];           /* for good */

/* the client */
bool up[LISTENERS];
byte number[LISTENERS];         /* messages sent on this connection */
byte asked[LISTENERS];          /* the READ under way there: k, or NOTHING */
#define NONE    0
#define PENDING 1
#define SENT(c) (2 + (c))
byte entry[KEYS];
byte with_[KEYS];               /* the number of the message that carries it */
byte highest[SLOTS];            /* the record: generation consumed last */
byte trained[KEYS];             /* ghost */
bool calm = false;
byte i, k_, g_, n_, m_, r_;     /* of a step, zero between them */

chan to0 = [2] of { byte, byte, byte };      /* number, acknowledgements, READ */
chan to1 = [2] of { byte, byte, byte };
chan back0 = [2] of { byte, byte };          /* number, generation of the bytes; 0: stale */
chan back1 = [2] of { byte, byte };
#define READABLE(k) (w[SLOT(k)].ready && !w[SLOT(k)].done && TICKET_GEN(k))
#ifdef MUT_TICKET_WITHOUT_GENERATION
#define TICKET_GEN(k) true
#else
#define TICKET_GEN(k) (w[SLOT(k)].gen == GEN(k))
#endif
#ifdef MUT_ACK_WITHOUT_GENERATION
#define ACK_GEN(k) true
#else
#define ACK_GEN(k) (w[SLOT(k)].gen == GEN(k))
#endif
#define KEY(s) ((s) * MAXGEN + w[s].gen - 1)

/* ------------------------------------------------------------------ the slot */
inline settle(s) {
  if
  :: w[s].done && w[s].pins == 0 ->
     assert(trained[KEY(s)] || D3_freed_before_it_was_consumed);
     w[s].ready = false; w[s].done = false
  :: else
  fi
}
inline let_go(c) {              /* the attempt of a listener ends */
  if
  :: holds[c] != NOTHING ->
     w[SLOT(holds[c])].pins = w[SLOT(holds[c])].pins & ~BIT(c);
     settle(SLOT(holds[c]));
     holds[c] = NOTHING
  :: else
  fi
}
inline consume(c, k) {
  if
  :: w[SLOT(k)].ready && !w[SLOT(k)].done && ACK_GEN(k) ->
     w[SLOT(k)].done = true;
     if
     :: holds[c] == k -> let_go(c)
     :: else -> settle(SLOT(k))
     fi
  :: else -> skip               /* False: done already, or another generation */
  fi
}

/* ------------------------------------------------------------------ a listener handles one message */
inline handle(c, to, back) {
  to ? n_, m_, r_;
  k_ = 0;
  do
  :: k_ < KEYS ->
     if
     :: m_ & BIT(k_) -> consume(c, k_)
     :: else
     fi;
     k_++
  :: else -> break
  od;
  if
  :: r_ == NOTHING -> skip
  :: r_ != NOTHING && READABLE(r_) ->
     let_go(c);                 /* an attempt that nobody came back to */
     w[SLOT(r_)].pins = w[SLOT(r_)].pins | BIT(c);
     holds[c] = r_;
     back ! n_, w[SLOT(r_)].gen;
#ifdef MUT_FREE_ON_SEND
     consume(c, r_)
#endif
  :: else -> back ! n_, 0
  fi;
  n_ = 0; m_ = 0; r_ = 0; k_ = 0
}

/* ------------------------------------------------------------------ the client */
inline confirm(c, n) {          /* the answer to message n: it and those before it were handled */
  k_ = 0;
  do
  :: k_ < KEYS ->
     if
#ifdef MUT_CONFIRMED_BY_AN_EARLIER_ANSWER
     :: entry[k_] == SENT(c) -> entry[k_] = NONE; with_[k_] = 0
#else
     :: entry[k_] == SENT(c) && with_[k_] <= n -> entry[k_] = NONE; with_[k_] = 0
#endif
     :: else
     fi;
     k_++
  :: else -> break
  od;
  k_ = 0
}
inline take_pending(c) {        /* into m_; they ride with message number[c] */
  m_ = 0; k_ = 0;
  do
  :: k_ < KEYS ->
     if
     :: entry[k_] == PENDING -> m_ = m_ | BIT(k_);
#ifdef MUT_CONFIRMED_WITHOUT_AN_ANSWER
        entry[k_] = NONE
#else
        entry[k_] = SENT(c); with_[k_] = number[c]
#endif
     :: else
     fi;
     k_++
  :: else -> break
  od;
  k_ = 0
}
inline lost(c, to, back) {      /* seen by both sides; the listener ends its attempt */
  printf("connection %d is lost\n", c);
  do
  :: nempty(to) -> to ? n_, m_, r_
  :: empty(to) -> break
  od;
  do
  :: nempty(back) -> back ? n_, g_
  :: empty(back) -> break
  od;
  let_go(c);
  k_ = 0;
  do
  :: k_ < KEYS ->
     if
     :: entry[k_] == SENT(c) ->
#ifdef MUT_ACK_NOT_SENT_AGAIN
        entry[k_] = NONE;
#else
        entry[k_] = PENDING;
#endif
        with_[k_] = 0
     :: else
     fi;
     k_++
  :: else -> break
  od;
  n_ = 0; m_ = 0; r_ = 0; g_ = 0; k_ = 0;
  up[c] = false; number[c] = 0; asked[c] = NOTHING
}
inline arrived(c, back) {
  back ? n_, g_;
  confirm(c, n_);
  r_ = asked[c]; asked[c] = NOTHING;
  printf("connection %d: answer %d for payload %d: generation %d\n", c, n_, r_, g_);
  if
  :: g_ == 0 ->                 /* the ring shows by this that it knows */
     entry[r_] = NONE; with_[r_] = 0
  :: else ->
     assert(g_ == GEN(r_) || D1_bytes_of_another_generation);
     if
#ifdef MUT_NO_RECORD_OF_DUPLICATES
     :: true ->
#else
     :: highest[SLOT(r_)] < GEN(r_) ->
#endif
        highest[SLOT(r_)] = GEN(r_);
        assert(!trained[r_] || D2_consumed_twice);
        trained[r_] = 1
     :: else                    /* a duplicate is acknowledged, too */
     fi;
     if
     :: entry[r_] == NONE -> entry[r_] = PENDING
     :: else
     fi
  fi;
  n_ = 0; g_ = 0; r_ = 0
}

#ifdef MUT_ACK_ONLY_WHERE_IT_CAME_FROM
#define REACHABLE(c) (c == LISTENERS - 1)
#else
#define REACHABLE(c) true
#endif
#define ANY_PENDING (entry[0] == PENDING || entry[KEYS - 1] == PENDING || entry[KEYS / 2] == PENDING || entry[(KEYS - 1) / 2] == PENDING)
/* A ticket exists once its payload is published. In calm times nobody is handed what was consumed: only its
 * acknowledgement can free it. */
#define ASKABLE(k) (w[SLOT(k)].gen >= GEN(k) && entry[k] == NONE && (!calm || (READABLE(k) && !trained[k])))
#define MAY_SEND(c, to) (up[c] && number[c] < NUMBERS && nfull(to))
#define READ_OPTION(c, to, k) \
  :: d_step { MAY_SEND(c, to) && asked[c] == NOTHING && ASKABLE(k) && (!calm || !asked_elsewhere(k)) -> \
       number[c]++; take_pending(c); to ! number[c], m_, k; asked[c] = k; m_ = 0; \
       printf("connection %d: READ %d with message %d\n", c, k, number[c]) }
#define asked_elsewhere(k) (asked[0] == (k) || asked[LISTENERS - 1] == (k))
#define CONNECTION_OPTIONS(c, to, back) \
  :: d_step { !up[c] && !gone[c] -> up[c] = true } \
  READ_OPTION(c, to, 0) \
  MORE_READS(c, to) \
  :: d_step { MAY_SEND(c, to) && ANY_PENDING && REACHABLE(c) -> number[c]++; take_pending(c); to ! number[c], m_, NOTHING; m_ = 0; \
       printf("connection %d: acknowledgements with message %d\n", c, number[c]) } \
  :: d_step { up[c] && nempty(to) && nfull(back) -> handle(c, to, back) } \
  :: d_step { nempty(back) -> arrived(c, back) } \
  :: d_step { up[c] && !calm -> lost(c, to, back) } \
  :: d_step { up[c] && number[c] == NUMBERS && empty(to) && empty(back) -> lost(c, to, back) }   /* retired */ \
  :: d_step { holds[c] != NOTHING && (!calm || w[SLOT(holds[c])].done) -> let_go(c) }   /* ack_timeout; sweep */
#if KEYS == 1
#define MORE_READS(c, to)
#elif KEYS == 2
#define MORE_READS(c, to) READ_OPTION(c, to, 1)
#elif KEYS == 3
#define MORE_READS(c, to) READ_OPTION(c, to, 1) READ_OPTION(c, to, 2)
#else
#define MORE_READS(c, to) READ_OPTION(c, to, 1) READ_OPTION(c, to, 2) READ_OPTION(c, to, 3)
#endif
#define PUBLISH_OPTION(s) \
  :: d_step { !w[s].ready && w[s].gen < MAXGEN -> w[s].gen++; w[s].ready = true; printf("publish %d\n", KEY(s)) }

active proctype Everybody() {
  d_step {
    i = 0;
    do
    :: i < LISTENERS -> holds[i] = NOTHING; asked[i] = NOTHING; i++
    :: else -> break
    od;
    i = 0
  }
end:
  do
  PUBLISH_OPTION(0)
#if SLOTS > 1
  PUBLISH_OPTION(1)
#endif
  CONNECTION_OPTIONS(0, to0, back0)
#if LISTENERS > 1
  CONNECTION_OPTIONS(1, to1, back1)
#endif
#ifdef ONE_GOES
  :: d_step { !calm && !gone[LISTENERS - 1] -> gone[LISTENERS - 1] = true;
       if
       :: up[LISTENERS - 1] -> lost(LISTENERS - 1, to1, back1)
       :: else
       fi }
#endif
  od
}

#define ALL_CONSUMED(s) (!w[s].ready && w[s].gen == MAXGEN)
active proctype End() {
  calm = true;
  timeout;
  assert(ALL_CONSUMED(0) || D4_stuck);
  assert(ALL_CONSUMED(SLOTS - 1) || D4_stuck)
}
