/* A final decision in a store (transport/store/decision.py): read, then compare-and-set against "absent", then read again.
 *
 * Deciders propose different values. Each is killed between any two steps and starts anew; the answer to a write is lost,
 * whether or not the write took place. What a decider has acted on, even one that was killed afterwards, is kept as a ghost.
 *
 * Defines: DECIDERS is 2 or 3; MUT_* plants a fault. */

#ifndef DECIDERS
#define DECIDERS 2
#endif
#define NOTHING 0

bool W1_two_decisions;
bool W2_not_proposed;
bool W3_stuck;

byte record = NOTHING;          /* in the store */
byte acted = NOTHING;           /* ghost: the decision that somebody has acted on */
bool calm = false;
byte ended;

inline act(value) {
  assert(acted == NOTHING || acted == value || W1_two_decisions);
  assert((value > 0 && value <= DECIDERS) || W2_not_proposed);
  acted = value; printf("%d acts on %d\n", me, value)
}

#define READS   0
#define WRITES  1
#define ENDED   2

#ifdef MUT_LOST_ANSWER_IS_NO     /* who lost the answer believes that another has decided, and decides something else */
#define AFTER_LOSS act(1 + me % DECIDERS); at = ENDED; ended++
#elif defined(MUT_LOST_ANSWER_IS_YES)
#define AFTER_LOSS act(me); at = ENDED; ended++
#else
#define AFTER_LOSS at = READS
#endif

proctype Decider(byte me) {
  byte at = READS;
end:
  do
  :: d_step { at == READS && record != NOTHING -> act(record); at = ENDED; ended++ }
  :: d_step { at == READS && record == NOTHING -> at = WRITES }
#ifdef MUT_WRITES_WITHOUT_COMPARING
  :: d_step { at == WRITES -> record = me; act(me); at = ENDED; ended++ }
#else
  :: d_step { at == WRITES && record == NOTHING -> record = me; act(me); at = ENDED; ended++ }
#ifndef MUT_REFUSED_IS_THE_END
  :: d_step { at == WRITES && record != NOTHING -> at = READS }
#endif
#endif
  :: d_step { at == WRITES && !calm ->   /* the answer is lost */
       if :: record == NOTHING -> record = me :: else fi; AFTER_LOSS }
  :: d_step { at == WRITES && !calm -> AFTER_LOSS }
  :: d_step { at == ENDED && !calm -> at = READS; ended-- }  /* asks again, also after it was killed */
  :: d_step { at == WRITES && !calm -> at = READS }          /* is killed, and starts anew */
  od
}

init {
  atomic {
    run Decider(1); run Decider(2);
#if DECIDERS > 2
    run Decider(3);
#endif
    skip
  }
  d_step { calm = true; printf("nothing fails from here on\n") }
  timeout;
  assert((ended == DECIDERS && record != NOTHING && record == acted) || W3_stuck)
}
